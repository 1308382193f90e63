"""What the whole-program tests share: running actdump, writing job files, checkpoints and corpora, reading stores.

The program is $ACTDUMP (ctest sets it), else the one in build/."""
import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/data/fixtures"
SAMPLE = ROOT / "configs/sample"
ACTDUMP = Path(os.environ.get("ACTDUMP", ROOT / "build/pipeline/actdump"))
SANITIZED = os.environ.get("ACTDUMP_SANITIZE", "none") != "none"
CASES = sorted(p.name for p in FIXTURES.iterdir() if (p / "golden.h5").exists())

OK, USAGE, INPUT, RESOURCE, DEVICE, BUG, STOPPED = 0, 2, 3, 4, 5, 6, 75

MPI_ENVIRONMENT = {
    # PMIx's default keeps what ranks share behind locks in shared memory. A rank killed while it holds one leaves the
    # launcher waiting for it for ever, after all ranks have ended (seen with PMIx 4.2, one kill in about ten).
    "PMIX_MCA_gds": "hash",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # More ranks than cores: threads that spin while they wait would starve the others.
    "OMP_WAIT_POLICY": "passive",
}


@dataclass
class Outcome:
    status: int  # exit status; negative: ended by that signal
    out: str
    err: str

    @property
    def text(self):
        return self.out + self.err

    def expect(self, status):
        assert self.status == status, f"exit status {self.status}, expected {status}:\n{self.text[-4000:]}"
        return self


def command(*arguments, ranks=None):
    """The command line of actdump, under mpirun where ranks is a number."""
    assert ACTDUMP.exists(), f"{ACTDUMP} is not there: build it, or set ACTDUMP"
    line = [str(ACTDUMP), *map(str, arguments)]
    return line if ranks is None else ["mpirun", "--oversubscribe", "-n", str(ranks), *line]


def environment(**changes):
    """The environment of a run; a change to None removes the variable."""
    env = {**os.environ, **MPI_ENVIRONMENT, **{k: v for k, v in changes.items() if v is not None}}
    for key in (k for k, v in changes.items() if v is None):
        env.pop(key, None)
    return env


def actdump(*arguments, ranks=None, env=None, cwd=None, timeout=200):
    """Runs actdump to its end and says how it ended."""
    return run_command(command(*arguments, ranks=ranks), {**without_leaks(arguments), **(env or {})}, cwd, timeout)


def without_leaks(arguments):
    """The leak check is for commands without MPI: Open MPI closes plugins that leaked, and a leak of a closed plugin can
    no longer be told from one of ours. What `run` calls is checked for leaks in the unit tests."""
    options = os.environ.get("ASAN_OPTIONS", "")
    return {"ASAN_OPTIONS": options.replace("detect_leaks=1", "detect_leaks=0")} if arguments[:1] == ("run",) else {}


def run_command(line, env=None, cwd=None, timeout=200):
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               errors="replace", env=environment(**(env or {})), cwd=cwd, start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Outcome(process.returncode, out, err)


# A process's peak counts what its parent held when it was forked: a parent of a few MiB starts it, not this one.
MEASURE = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


def peak_memory(*arguments):
    """Runs actdump, which must succeed; returns the largest resident set of its life, in bytes."""
    outcome = run_command([sys.executable, "-S", "-c", MEASURE, *command(*arguments)]).expect(OK)
    return int(outcome.err.splitlines()[-1]) * 1024


# ---------------------------------------------------------------- jobs

def make_job(folder, *, checkpoint, corpus, captures=None, dtype=None, store="store", name="job.json", context=32,
             corpus_options=None, model_options=None, store_options=None, run=None):
    """Writes a job file into folder and returns (its path, the store's path). corpus: a Megatron pair without suffix."""
    folder = Path(folder)
    model = {"checkpoint": str(checkpoint), "device": "cpu", **(model_options or {})}
    if dtype:
        model["dtype"] = dtype
    job = {
        "model": model,
        "corpus": {"format": "megatron", "path": str(corpus), "context": context, **(corpus_options or {})},
        "captures": captures or {"everything": {"values": ["*"], "layers": "all"}},
        "store": {"path": str(store), **(store_options or {})},
    }
    if run:
        job["run"] = run
    path = folder / name
    path.write_text(json.dumps(job, indent=2))
    return path, folder / store


def case_job(folder, case, **options):
    """A job over a fixture case's own corpus: every value of every layer unless options say otherwise."""
    options.setdefault("checkpoint", FIXTURES / case)
    return make_job(folder, corpus=FIXTURES / case / "corpus", **options)


def run_case(folder, case, *, ranks=None, **options):
    """Runs a fixture case to a store and returns the store's path."""
    job, store = case_job(folder, case, **options)
    actdump("run", job, ranks=ranks).expect(OK)
    return store


# ---------------------------------------------------------------- corpora

def write_corpus(stem, documents, dtype="<u2", code=8):
    """A Megatron indexed dataset: one sequence and one document for each list of ids."""
    stem = Path(stem)
    tokens = [np.asarray(d, dtype) for d in documents]
    width = np.dtype(dtype).itemsize
    lengths = np.array([len(t) for t in tokens], "<i4")
    offsets = np.concatenate([[0], np.cumsum(lengths.astype("<i8"))[:-1] * width]).astype("<i8")[: len(tokens)]
    stem.with_suffix(".bin").write_bytes(b"".join(t.tobytes() for t in tokens))
    stem.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(tokens), len(tokens) + 1) + lengths.tobytes()
        + offsets.tobytes() + np.arange(len(tokens) + 1, dtype="<i8").tobytes())
    return stem


def random_documents(seed, lengths, vocabulary=97):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, n) for n in lengths]


def case_documents(case):
    """The token ids of a fixture case, a list of arrays."""
    with h5py.File(FIXTURES / case / "golden.h5") as file:
        return [file[f"sequences/{k}/input_ids"][...] for k in range(len(file["sequences"]))]


# ---------------------------------------------------------------- checkpoints

SAFETENSORS_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}


def read_safetensors(path):
    """{name: (dtype name, array)}; bfloat16 comes as its 16 bits."""
    data = Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data[8 + size + begin:8 + size + end], SAFETENSORS_DTYPES[entry["dtype"]])
        tensors[name] = (entry["dtype"], flat.reshape(entry["shape"]))
    return tensors


def write_safetensors(path, tensors, edit_header=None):
    """The reverse. edit_header(header) may break the header before it is written."""
    header, body, at = {}, [], 0
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        body.append(raw)
        at += len(raw)
    if edit_header:
        edit_header(header)
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(body))


def copy_checkpoint(case, folder, *, config=None, tensors=None):
    """A fixture's checkpoint in another folder. config(dict) and tensors(dict) edit it in place on the way."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (FIXTURES / case).iterdir():
        if file.name == "config.json" or "safetensors" in file.name:
            shutil.copy(file, folder / file.name)
    if config:
        settings = json.loads((folder / "config.json").read_text())
        config(settings)
        (folder / "config.json").write_text(json.dumps(settings))
    if tensors:
        held = read_safetensors(folder / "model.safetensors")
        tensors(held)
        write_safetensors(folder / "model.safetensors", held)
    return folder


# ---------------------------------------------------------------- stores

@contextlib.contextmanager
def open_store(store):
    with h5py.File(Path(store) / "store.h5") as file:
        yield file


def manifest(store):
    return json.loads((Path(store) / "store.json").read_text())


def segments(store):
    return sorted((Path(store) / "segments").glob("[0-9]*.h5"))


def segment_bytes(store):
    """{file name: bytes} of all segments."""
    return {p.name: p.read_bytes() for p in segments(store)}


def value_paths(group):
    """The paths of all captured values under a capture's group."""
    found = []
    group.visititems(lambda path, item: found.append(path)
                     if isinstance(item, h5py.Dataset) and not path.startswith("rows/") else None)
    return sorted(found)


def read_values(store, capture="everything"):
    """{path: array} of a capture, its rows/ included."""
    with open_store(store) as file:
        return {path: file[capture][path][...] for path in
                [*value_paths(file[capture]), "rows/sequence", "rows/position", "rows/input_ids"]}


def looks_whole(store):
    """Whether a folder could be mistaken for a finished store."""
    try:
        return bool(manifest(store).get("complete"))
    except (OSError, ValueError):
        return False
