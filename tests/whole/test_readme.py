"""What the README shows can be done: its commands exist, its files are there, its Python runs on the sample's store."""
import ast
import importlib.util
import re
import shlex
import subprocess
import sys

import pytest

import harness
from python_package import CLEAN, install

README = (harness.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL = [line.strip().removeprefix("$ ") for kind, text in BLOCKS if kind in ("sh", "bash", "shell", "console")
         for line in text.replace("\\\n", " ").splitlines() if line.strip()]
PYTHON = [text for kind, text in BLOCKS if kind in ("python", "py")]
STORE = "out/sample-mamba"


def words_of(line):
    return shlex.split(line, comments=True)


def actdump_calls():
    for line in SHELL:
        words = words_of(line)
        for i, word in enumerate(words):
            if word.rpartition("/")[2] == "actdump" and i + 1 < len(words):
                yield line, words[i + 1:]


def test_the_readme_begins_with_what_works():
    assert any(words_of(line)[:2] == ["make", "demo"] for line in SHELL)
    assert list(actdump_calls()) and PYTHON


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("make ")])
def test_make_targets_exist(line):
    done = subprocess.run(["make", "--dry-run", "--no-print-directory", *words_of(line)[1:]], cwd=harness.ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line,words", list(actdump_calls()))
def test_commands_and_options_exist(line, words):
    name = words[0]
    if name.startswith("-"):
        harness.actdump(name).expect(harness.OK)
        return
    text = harness.actdump(name, "--help").expect(harness.OK).out
    for option in (w.partition("=")[0] for w in words[1:] if w.startswith("--")):
        assert option in text, f"{line}: actdump {name} --help does not know {option}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?<![\w/])(?:configs|schemas|tests|kernels|engine|pipeline|python)/[\w./-]*\w", README))))
def test_files_are_there(path):
    assert (harness.ROOT / path).exists()


@pytest.mark.parametrize("target", sorted({t for t in re.findall(r"\]\(([^)#]+)", README) if "://" not in t}))
def test_links_lead_somewhere(target):
    assert (harness.ROOT / target).exists()


@pytest.fixture(scope="module")
def folder_of_the_demo(tmp_path_factory):
    """A folder in which the sample's job has run, on its first chapters."""
    folder = tmp_path_factory.mktemp("demo")
    install(sys.executable, folder)
    harness.actdump("run", harness.ROOT / "configs/sample-mamba.json", "--set", f"store.path={folder / STORE}",
                    "--set", "corpus.limit=4").expect(harness.OK)
    return folder


def imports_of(text):
    """The top-level packages that a piece of Python imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_blocks_run(number, folder_of_the_demo):
    code = compile(PYTHON[number], f"README.md, Python block {number}", "exec")
    lacking = sorted(n for n in imports_of(PYTHON[number]) if n != "actdump" and importlib.util.find_spec(n) is None)
    if lacking:
        pytest.skip(f"compiled only: {', '.join(lacking)} is not among the tests' packages")
    assert code and STORE in PYTHON[number], "a block that a reader cannot run after make demo"
    done = subprocess.run([sys.executable, "-c", PYTHON[number]], cwd=folder_of_the_demo, capture_output=True, text=True,
                          env=CLEAN)
    assert done.returncode == 0, done.stderr
