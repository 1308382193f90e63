"""Stores that the C program writes now, for all tests: $ACTDUMP is the program (else the one in build/)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/whole"))
import harness  # noqa: E402

FAMILIES = ("mamba", "mamba-bf16", "jamba", "bamba", "laguna")


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    """stores(case): every value of a fixture case, in small segments. Not to be changed: copy it first."""
    made = {}

    def make(case):
        if case not in made:
            made[case] = harness.run_case(tmp_path_factory.mktemp(case), case, store_options={"unit_tokens": 16})
        return made[case]

    return make


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """The sample's residual stream over some 24,000 tokens of 20 chapters, bfloat16: what an epoch is tested on."""
    folder = tmp_path_factory.mktemp("sample")
    job, store = harness.make_job(
        folder,
        checkpoint=harness.SAMPLE / "mamba",
        corpus=harness.SAMPLE / "corpus",
        dtype="bfloat16",
        context=2048,
        corpus_options={"limit": 20},
        store_options={"unit_tokens": 4096, "chunk_rows": 256},
        captures={
            "residuals": {"values": ["layer_output"], "layers": [1, 3], "dtype": "bfloat16"},
            "some": {"values": ["layer_output", "next_token_probs"], "layers": [3], "positions": {"every": 7}},
        },
    )
    harness.actdump("run", job).expect(harness.OK)
    return store


@pytest.fixture
def broken(stores, tmp_path):
    """A copy of mamba's store, to break."""
    return Path(shutil.copytree(stores("mamba"), tmp_path / "store"))


@pytest.fixture(scope="session")
def run_module():
    def run(*arguments, status=0):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "default"},
            timeout=200,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
