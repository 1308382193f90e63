"""Installs ./python into the venv that runs this, and runs its tests on stores that actdump writes for them.

Tests that need torch skip where it is not installed; where build/venv-training is
(python/tests/requirements-training.txt says with what), the tests run with its Python too."""

import os
import shutil
import subprocess
import sys

import pytest

import harness

TRAINING = harness.ROOT / "build/venv-training/bin/python"
TORCH_TESTS = ("test_training.py", "test_examples.py", "test_store.py")


def install(python, folder):
    """From a copy: building leaves files in the source's folder."""
    source = shutil.copytree(
        harness.ROOT / "python", folder / "python", ignore=shutil.ignore_patterns("__pycache__", "build")
    )
    line = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
    can_build = subprocess.run([python, "-c", "import setuptools, wheel"], capture_output=True).returncode == 0
    done = subprocess.run([*line, *["--no-build-isolation"] * can_build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run_tests(python, *names):
    tests = [harness.ROOT / "python/tests" / n for n in names] or [harness.ROOT / "python/tests"]
    line = [python, "-B", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--tb=short", *map(str, tests)]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # what is tested is what was installed
    done = subprocess.run(
        line,
        cwd=harness.ROOT / "python/tests",
        env={**env, "ACTDUMP": str(harness.ACTDUMP)},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_package_as_installed(tmp_path):
    install(sys.executable, tmp_path)
    where = subprocess.run(
        [sys.executable, "-c", "import actdump; print(actdump.__file__)"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    ).stdout
    assert "site-packages" in where
    run_tests(sys.executable)


def test_with_torch(tmp_path):
    if not TRAINING.exists():
        pytest.skip(f"{TRAINING.parent.parent} is not there: no torch to test with")
    install(str(TRAINING), tmp_path)
    run_tests(str(TRAINING), *TORCH_TESTS)
