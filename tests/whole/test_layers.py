"""Who may know whom: kernels/base < kernels < engine < pipeline, and each outside library in its own place.

The rules are the table below; a file that needs more than they allow belongs elsewhere."""
import re

import pytest

import harness

LAYERS = ("kernels", "engine", "pipeline")
SOURCES = sorted(p.relative_to(harness.ROOT).as_posix() for layer in LAYERS
                 for p in (harness.ROOT / layer).rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh"))
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)

# Folder (a prefix of the file's path), and the folders of ours that it may include from. The longest prefix holds.
MAY_INCLUDE = {
    "kernels/base/": ("kernels/base/",),
    "kernels/": ("kernels/",),
    "engine/": ("kernels/", "engine/"),
    "pipeline/": ("kernels/base/", "kernels/", "engine/", "pipeline/"),
}

# An outside header, and the only files (prefixes of paths) that may name it.
ONLY_IN = {
    r"mpi\.h": ("pipeline/ranks.c", "pipeline/main.c"),
    r"cuda.*|cublas.*|nvrtc.*|cooperative_groups.*|mma\.h": ("kernels/cuda/",),
    r"dnnl.*|oneapi/.*": ("kernels/cpu/",),
    r"hdf5.*|H5.*": ("pipeline/corpus", "pipeline/segment", "pipeline/writer", "pipeline/store", "pipeline/index",
                     "pipeline/verify", "pipeline/info", "pipeline/hdf5"),
    r"cjson/.*|cJSON\.h": ("engine/json", "engine/model", "engine/config", "engine/safetensors", "pipeline/job",
                           "pipeline/store", "pipeline/index", "pipeline/verify", "pipeline/info", "pipeline/run",
                           "pipeline/plan", "pipeline/resume", "pipeline/summary", "pipeline/manifest",
                           "pipeline/command"),
    r"zstd.*": ("pipeline/writer", "pipeline/segment", "pipeline/compress", "pipeline/store", "pipeline/verify",
                "pipeline/chunk"),
}

# A call that ends the process or writes to standard output, and the only files that may make it.
CALLS_ONLY_IN = {
    r"\b(?:_?exit|_Exit|quick_exit|abort)\s*\(": ("pipeline/main.c",),
    r"\bMPI_Abort\s*\(": ("pipeline/main.c", "pipeline/ranks.c"),
    r"(?<![a-z_])(?:printf|puts|putchar)\s*\(|\bstdout\b": ("pipeline/main.c", "pipeline/command", "pipeline/info",
                                                           "pipeline/progress", "kernels/base/log.c"),
}


def text_of(source):
    return (harness.ROOT / source).read_text()


def code_of(source):
    return COMMENT_OR_STRING.sub(" ", text_of(source))


def includes(source):
    return [(quote == '"', name) for quote, name in INCLUDE.findall(text_of(source))]


def test_there_is_something_to_look_at():
    assert len(SOURCES) > 30
    assert any(name == "kernels/base/error.h" for source in SOURCES for _, name in includes(source))


@pytest.mark.parametrize("source", SOURCES)
def test_nobody_includes_upwards(source):
    folder = max((f for f in MAY_INCLUDE if source.startswith(f)), key=len)
    for ours, name in includes(source):
        if ours or name.startswith(LAYERS):
            assert (harness.ROOT / name).exists(), f"{name}: our headers are named from the top of the tree"
            assert name.startswith(MAY_INCLUDE[folder]), f"{source} is in {folder} and includes {name}"


@pytest.mark.parametrize("header", ONLY_IN)
def test_outside_libraries_stay_in_their_place(header):
    users = [s for s in SOURCES for _, name in includes(s) if re.fullmatch(header, name)]
    strays = [s for s in users if not s.startswith(ONLY_IN[header])]
    assert not strays, f"{header} is included by {strays}"


@pytest.mark.parametrize("call", CALLS_ONLY_IN)
def test_only_main_ends_the_process_and_only_commands_print(call):
    strays = [f"{s}: {m.group(0)}" for s in SOURCES if not s.startswith(CALLS_ONLY_IN[call])
              for m in re.finditer(call, code_of(s))]
    assert not strays


def test_a_family_holds_wiring_not_arithmetic():
    """No file of a family reaches past the backend table to the kernels of a device."""
    for source in (s for s in SOURCES if s.startswith("engine/")):
        for _, name in includes(source):
            assert not re.match(r"kernels/(cpu|cuda)/", name), f"{source} includes {name}"
