"""Installs ./python into the venv that runs this, and runs its tests on stores that actdump writes for them.

What needs PyTorch or other packages that are not among these tests' is test_python_training.py's."""
import sys

from python_package import install, run_tests


def test_the_package_as_installed(tmp_path):
    install(sys.executable, tmp_path)
    said = run_tests(sys.executable)
    assert " passed" in said
