"""The examples train on the sample's store, below bounds that their controls do not reach."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import harness

EXAMPLES = harness.ROOT / "python/examples"


@pytest.fixture(scope="module")
def sample_store(sample):
    pytest.importorskip("torch", reason="torch is not installed")
    return sample


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{\n") :])


def test_the_probe(sample_store):
    """Which token came before: uniform guessing is 6.93 nats, the tokens' frequencies alone some 5.5."""
    found = run("probe.py", sample_store, "--epochs", 6)
    assert found["probe"]["cross_entropy"] < 4.5 < found["shuffled labels"]["cross_entropy"]
    assert found["probe"]["accuracy"] > 0.3 > found["shuffled labels"]["accuracy"]


@pytest.mark.skipif(
    importlib.util.find_spec("dictionary_learning") is None, reason="the package dictionary-learning is not installed"
)
def test_the_sparse_autoencoder(sample_store, tmp_path):
    found = run("sae.py", sample_store, "--steps", 200, "--save", tmp_path)
    assert found["unexplained"] < 0.35 < found["unexplained_untrained"]
    assert (tmp_path / "trainer_0/ae.pt").exists()


def test_the_benchmark_of_reading(sample):
    """It runs and measures all ways. How fast the machine is at this moment is not a test's matter; by processor time
    and with chunks this small, shuffling takes a part of the limit that was never seen below 0.7."""
    done = subprocess.run(
        [
            sys.executable,
            str(harness.ROOT / "python/bench_reading.py"),
            str(sample),
            "--seconds",
            "0.3",
            "--rounds",
            "3",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 5 and all(x["MB_per_s"] > 0 for x in found.values())
    assert found["shuffled batches"]["of_limit_cpu"] > 0.5
    assert found["shuffled batches"]["of_limit"] > 10 * found["h5py, single rows at random"]["of_limit"]
