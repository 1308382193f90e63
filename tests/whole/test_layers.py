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

# Headers that the build makes.
GENERATED = {"cpu_op_files.h"}

# What an outside library's code looks like, and the only files (prefixes of paths) that may use it.
ONLY_IN = {
    "MPI": (r"\bMPI_\w+|mpi\.h", ("pipeline/ranks.c", "pipeline/main.c")),
    "CUDA": (r"\bcuda[A-Z]\w+|\bcublas\w+|[<\"](?:cuda|cublas|cooperative_groups|mma)\w*\.h", ("kernels/cuda/",)),
    "oneDNN": (r"\bdnnl_\w+|dnnl\w*\.h", ("kernels/cpu/",)),
    "HDF5": (r"\bH5[A-Z]\w*\s*\(|\bhid_t\b|[<\"]hdf5\w*\.h", (
        "pipeline/hdf5_util", "pipeline/corpus", "pipeline/segment", "pipeline/writer", "pipeline/store", "pipeline/index",
        "pipeline/verify", "pipeline/info", "pipeline/chunk")),
    "zstd": (r"\bZSTD_\w+|[<\"]zstd\w*\.h", ("pipeline/chunk", "pipeline/hdf5_util")),
    "cJSON": (r"\bcJSON\w*", (
        "engine/json", "engine/config", "engine/model", "engine/safetensors", "engine/families/", "pipeline/job",
        "pipeline/store", "pipeline/manifest", "pipeline/index", "pipeline/verify", "pipeline/info", "pipeline/run",
        "pipeline/summary", "pipeline/command")),
}

# A call that ends the process or writes to standard output, and the only files that may make it.
CALLS_ONLY_IN = {
    r"\b(?:exit|_Exit|quick_exit|abort)\s*\(": ("pipeline/main.c",),
    r"\b_exit\s*\(": ("pipeline/main.c", "pipeline/stop.c"),  # stop: in the handler of a second signal
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


def includes_of(source):
    return [f"<{name}" for _, name in includes(source)]


def test_there_is_something_to_look_at():
    assert len(SOURCES) > 30
    assert any(name == "kernels/base/error.h" for source in SOURCES for _, name in includes(source))


@pytest.mark.parametrize("source", SOURCES)
def test_nobody_includes_upwards(source):
    folder = max((f for f in MAY_INCLUDE if source.startswith(f)), key=len)
    for ours, name in includes(source):
        if ours or name.startswith(LAYERS):
            if name in GENERATED:
                continue
            assert (harness.ROOT / name).exists(), f"{name}: our headers are named from the top of the tree"
            assert name.startswith(MAY_INCLUDE[folder]), f"{source} is in {folder} and includes {name}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_outside_libraries_stay_in_their_place(library):
    pattern, places = ONLY_IN[library]
    users = [s for s in SOURCES if re.search(pattern, code_of(s)) or any(re.search(pattern, line) for line in includes_of(s))]
    assert not [s for s in users if not s.startswith(places)]


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
