"""The tests of ./python that want PyTorch, dictionary-learning, datasets, pyarrow and tokenizers, in a venv with those.

tests/setup.sh training makes it (build/venv-training) when this asks. Where it cannot be had (no network, no room, or
TRAINING=no in the environment) this skips and says why; where it is there, no test of these may skip."""
import os
import subprocess

import pytest

import harness
from python_package import install, locked, run_tests

VENV = harness.ROOT / "build/venv-training"
TESTS = ("test_training.py", "test_examples.py", "test_corpus.py",
         "test_store.py::test_bfloat16_reaches_torch_without_conversion")


@pytest.fixture(scope="module")
def python():
    if os.environ.get("TRAINING") == "no":
        pytest.skip("TRAINING=no: the tests that train were not wanted")
    with locked(VENV.with_suffix(".lock")):
        done = subprocess.run([harness.ROOT / "tests/setup.sh", "training"], capture_output=True, text=True)
    if done.returncode != 0:
        words = (done.stderr.strip().splitlines() or ["no more was said"])[-1]
        pytest.skip(f"tests/setup.sh training failed ({done.returncode}): {words}")
    return str(VENV / "bin/python")


def test_training_and_corpora(python, tmp_path):
    install(python, tmp_path)
    said = run_tests(python, *TESTS)
    assert " passed" in said and " skipped" not in said, said
