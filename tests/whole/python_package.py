"""The package in python/, installed in a venv as its users install it."""
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess

import harness

SOURCE = harness.ROOT / "python"
CLEAN = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # what is tested is what was installed


def digest():
    files = [SOURCE / "pyproject.toml", *sorted((SOURCE / "actdump").glob("*.py"))]
    return hashlib.sha256(b"".join(f.name.encode() + f.read_bytes() for f in files)).hexdigest()


@contextlib.contextmanager
def locked(path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prefix_of(python):
    """The venv's folder; empty where the Python does not run."""
    return subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True).stdout.strip()


def install(python, folder):
    """`pip install ./python` where that was not done yet for these sources; tests of two files may ask at one time."""
    stamp = harness.Path(prefix_of(python)) / "actdump.installed"
    with locked(stamp.with_suffix(".lock")):
        if stamp.exists() and stamp.read_text() == digest():
            return
        # From a copy: building leaves files in the source's folder.
        copy = shutil.copytree(SOURCE, folder / "python", ignore=shutil.ignore_patterns("__pycache__", "build"))
        line = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
        can_build = subprocess.run([python, "-c", "import setuptools, wheel"], capture_output=True).returncode == 0
        done = subprocess.run([*line, *["--no-build-isolation"] * can_build, str(copy)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        stamp.write_text(digest())
    where = subprocess.run([python, "-c", "import actdump; print(actdump.__file__)"], cwd=folder, text=True,
                           capture_output=True, env=CLEAN).stdout
    assert "site-packages" in where


def run_tests(python, *names):
    """Runs tests of python/tests; returns what pytest said."""
    tests = [SOURCE / "tests" / n for n in names] or [SOURCE / "tests"]
    line = [python, "-B", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--tb=short", "--durations=8"]
    done = subprocess.run([*line, *map(str, tests)], cwd=SOURCE / "tests", capture_output=True, text=True,
                          env={**CLEAN, "ACTDUMP": str(harness.ACTDUMP)})
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
