"""Broken checkpoints, corpora and jobs: the exit status, a word of the message that leads to the fault, and nothing left
behind that looks like a store.

Each row of a table breaks one thing of a job that works. The readers' own tables, byte by byte, are in tests/unit."""
import json
import shutil
import struct

import h5py
import numpy as np
import pytest

import harness

WEIGHTS = "model.safetensors"


def run_broken(tmp_path, status, words, job):
    outcome = harness.actdump("run", job, timeout=60)
    assert outcome.status == status, f"exit status {outcome.status}:\n{outcome.text[-2000:]}"
    for word in words:
        assert word in outcome.err, outcome.err
    store = tmp_path / "store"
    assert not harness.looks_whole(store)
    assert not harness.segments(store)


# ---------------------------------------------------------------- config.json

def setting(**changes):
    def edit(config):
        for key, value in changes.items():
            if value is ...:
                del config[key]
            else:
                config[key] = value
    return edit


CONFIGS = {
    "another architecture": (setting(architectures=["GPT2LMHeadModel"], model_type="gpt2"), ["gpt2"]),
    "a size off by one": (setting(hidden_size=25, intermediate_size=50), ["shape", "25"]),
    "a state off by one": (setting(state_size=9), ["x_proj", "shape"]),
    "a vocabulary off by one": (setting(vocab_size=98), ["embed", "[97, 24]", "[98, 24]"]),
    "one layer more": (setting(num_hidden_layers=4), ["layers.3"]),
    "no layer": (setting(num_hidden_layers=0), ["num_hidden_layers"]),
    "a negative size": (setting(hidden_size=-24), ["hidden_size", "-24"]),
    "an absurd size": (setting(hidden_size=10**15), ["hidden_size"]),
    "a size that is no whole number": (setting(hidden_size=24.5), ["hidden_size", "24.5"]),
    "a size in quotes": (setting(hidden_size="24"), ["hidden_size", "24"]),
    "another activation": (setting(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "an epsilon of nothing": (setting(layer_norm_epsilon="small"), ["layer_norm_epsilon"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name, tmp_path):
    edit, words = CONFIGS[name]
    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "checkpoint", config=edit)
    job, _ = harness.case_job(tmp_path, "mamba", checkpoint=checkpoint)
    run_broken(tmp_path, harness.INPUT, words, job)


# ---------------------------------------------------------------- files of a checkpoint

def cut(name, keep):
    def edit(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:keep])
    return edit


def replace(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def remove(name):
    return lambda folder: (folder / name).unlink()


def header(edit_header):
    """Breaks the header of model.safetensors. edit_header(header, name of its first tensor)"""
    def edit(folder):
        path = folder / WEIGHTS
        tensors = harness.read_safetensors(path)
        first = next(iter(tensors))
        harness.write_safetensors(path, tensors, lambda h: edit_header(h, first))
    return edit


def tensor(edit_tensors):
    def edit(folder):
        tensors = harness.read_safetensors(folder / WEIGHTS)
        edit_tensors(tensors)
        harness.write_safetensors(folder / WEIGHTS, tensors)
    return edit


def shift(header, name, begin, end):
    offsets = header[name]["data_offsets"]
    header[name]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]


CHECKPOINTS = {
    "no config": (remove("config.json"), ["config.json"]),
    "a config cut short": (cut("config.json", 40), ["config.json"]),
    "a config of something else": (replace("config.json", b"[1, 2]"), ["config.json"]),
    "no weights": (remove(WEIGHTS), [WEIGHTS]),
    "empty weights": (replace(WEIGHTS, b""), [WEIGHTS]),
    "weights of another format": (replace(WEIGHTS, b"\x80\x02}q\x00." * 50), [WEIGHTS]),
    "a header longer than the file": (replace(WEIGHTS, struct.pack("<Q", 1 << 20) + b"{}"), [WEIGHTS, "1048576"]),
    "a header's length of 2^63": (replace(WEIGHTS, struct.pack("<Q", 1 << 63) + b"{}"), [WEIGHTS]),
    "a header that is not JSON": (replace(WEIGHTS, struct.pack("<Q", 8) + b"{\"a\": 1,"), [WEIGHTS]),
    "weights cut short": (cut(WEIGHTS, 70000), [WEIGHTS]),
    "offsets past the file": (header(lambda h, n: shift(h, list(h)[-1], 0, 400)), [WEIGHTS]),
    "tensors that overlap": (header(lambda h, n: shift(h, list(h)[1], -16, -16)), [WEIGHTS]),
    "offsets that run backwards": (header(lambda h, n: h[n].update(data_offsets=[64, 0])), ["data_offsets"]),
    "a shape that does not fill its bytes": (header(lambda h, n: h[n].update(shape=[1, 2, 3])), ["data_offsets"]),
    "a shape that overflows": (header(lambda h, n: h[n].update(shape=[2**32, 2**32, 4])), ["shape"]),
    "an unknown dtype": (header(lambda h, n: h[n].update(dtype="Q7")), ["Q7"]),
    "weights of whole numbers": (header(lambda h, n: h[n].update(dtype="I32")), ["I32"]),
    "no such tensor": (tensor(lambda t: t.pop("backbone.layers.1.mixer.A_log")), ["backbone.layers.1.mixer.A_log"]),
    "a transposed tensor": (tensor(lambda t: t.update({"backbone.layers.0.mixer.x_proj.weight": (
        "F32", t["backbone.layers.0.mixer.x_proj.weight"][1].T.copy())})), ["x_proj", "shape"]),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name, tmp_path):
    edit, words = CHECKPOINTS[name]
    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "checkpoint")
    edit(checkpoint)
    job, _ = harness.case_job(tmp_path, "mamba", checkpoint=checkpoint)
    run_broken(tmp_path, harness.INPUT, words, job)


INDEX = "model.safetensors.index.json"
SHARD = "model-00003-of-00011.safetensors"


def index(edit_map):
    def edit(folder):
        held = json.loads((folder / INDEX).read_text())
        edit_map(held["weight_map"])
        (folder / INDEX).write_text(json.dumps(held))
    return edit


def first_of(weight_map, shard):
    return next(k for k, v in weight_map.items() if v == shard)


SHARDED = {
    "a shard is missing": (remove(SHARD), [SHARD]),
    "a stray shard": (lambda f: shutil.copy(f / SHARD, f / "model-00012-of-00012.safetensors"), ["model-00012-of-00012"]),
    "a tensor said to be in another shard": (index(lambda m: m.update({first_of(m, SHARD): "model-00001-of-00011.safetensors"})),
                                             ["model-00001-of-00011", SHARD]),
    "a tensor that the index lacks": (index(lambda m: m.pop(first_of(m, SHARD))), [SHARD]),
    "a tensor that no shard has": (index(lambda m: m.update({"model.nothing": SHARD})), ["model.nothing"]),
    "a path out of the folder": (index(lambda m: m.update({first_of(m, SHARD): "../" + SHARD})), ["../"]),
    "an index of nothing": (replace(INDEX, b"{}"), ["weight_map"]),
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_checkpoint(name, tmp_path):
    edit, words = SHARDED[name]
    checkpoint = harness.copy_checkpoint("jamba-bf16", tmp_path / "checkpoint")
    edit(checkpoint)
    job, _ = harness.case_job(tmp_path, "jamba-bf16", checkpoint=checkpoint)
    run_broken(tmp_path, harness.INPUT, words, job)


# ---------------------------------------------------------------- corpora

def megatron(edit=None, documents=((1, 2, 3), (4, 5))):
    def write(folder):
        harness.write_corpus(folder / "c", documents)
        if edit:
            edit(folder)
        return {"format": "megatron", "path": "c"}
    return write


def patch(name, at, data):
    def edit(folder):
        held = bytearray((folder / name).read_bytes())
        held[at:at + len(data)] = data
        (folder / name).write_bytes(held)
    return edit


def npy(array=None, data=None):
    def write(folder):
        if data is not None:
            (folder / "c.npy").write_bytes(data)
        else:
            np.save(folder / "c.npy", array)
        return {"format": "npy", "path": "c.npy"}
    return write


def raw(data, dtype="uint16"):
    def write(folder):
        (folder / "c").write_bytes(data)
        return {"format": "raw", "path": "c", "dtype": dtype}
    return write


def hdf5(array, dataset="ids"):
    def write(folder):
        with h5py.File(folder / "c.h5", "w") as file:
            file["ids"] = array
        return {"format": "hdf5", "path": "c.h5", "dataset": dataset}
    return write


def not_hdf5(folder):
    (folder / "c.h5").write_bytes(b"not HDF5 at all" * 40)
    return {"format": "hdf5", "path": "c.h5", "dataset": "ids"}


# .idx: magic 9, version 8, dtype 1, counts 8 and 8, then lengths (i4), offsets (i8), document bounds (i8)
LENGTHS, OFFSETS, BOUNDS = 34, 34 + 2 * 4, 34 + 2 * 4 + 2 * 8
CORPORA = {
    "no .idx": (megatron(remove("c.idx")), ["c.idx"]),
    "no .bin": (megatron(remove("c.bin")), ["c.bin"]),
    "wrong magic": (megatron(patch("c.idx", 0, b"X")), ["c.idx"]),
    "another version": (megatron(patch("c.idx", 9, struct.pack("<Q", 9))), ["c.idx", "9"]),
    "an unknown dtype": (megatron(patch("c.idx", 17, b"\x63")), ["c.idx", "99"]),
    "a dtype of floats": (megatron(patch("c.idx", 17, b"\x06")), ["c.idx"]),
    "an .idx cut short": (megatron(cut("c.idx", 50)), ["c.idx"]),
    "absurd counts": (megatron(patch("c.idx", 18, struct.pack("<QQ", 1 << 61, 1 << 61))), ["c.idx"]),
    "a .bin cut short": (megatron(cut("c.bin", 7)), ["c.bin"]),
    "an offset past the .bin": (megatron(patch("c.idx", OFFSETS + 8, struct.pack("<q", 1000))), ["c.idx"]),
    "a negative length": (megatron(patch("c.idx", LENGTHS, struct.pack("<i", -3))), ["c.idx"]),
    "a document bound past the sequences": (megatron(patch("c.idx", BOUNDS + 8, struct.pack("<q", 77))), ["c.idx", "77"]),
    "bounds that run backwards": (megatron(patch("c.idx", BOUNDS + 8, struct.pack("<q", -1))), ["c.idx"]),
    "an id past the embedding": (megatron(documents=((1, 2, 3), (4, 97, 5))), ["97", "document 1"]),
    "nothing but empty documents": (megatron(documents=((), ())), ["empty"]),
    "npy: wrong magic": (npy(data=b"\x93NUMPI\x01\x00" + bytes(200)), ["c.npy"]),
    "npy: floats": (npy(np.zeros((4, 4))), ["c.npy", "f8"]),
    "npy: three axes": (npy(np.zeros((2, 2, 2), np.int32)), ["c.npy"]),
    "npy: Fortran order": (npy(np.asfortranarray(np.ones((4, 3), np.int32))), ["c.npy", "ortran"]),
    "npy: a negative id": (npy(np.array([[1, 2], [3, -4]])), ["-4"]),
    "npy: an id past 32 bits": (npy(np.array([[1, 2], [3, 2**33]])), [str(2**33)]),
    "npy: an id past 63 bits": (npy(np.array([[1, 2], [3, 2**64 - 5]], np.uint64)), [str(2**64 - 5)]),
    "raw: not there": (lambda folder: {"format": "raw", "path": "c", "dtype": "uint16"}, ["c"]),
    "raw: half a token": (raw(b"\x01\x00\x02"), ["3"]),
    "raw: empty": (raw(b""), ["c"]),
    "raw: an id past the embedding": (raw(struct.pack("<II", 5, 1 << 31), "uint32"), [str(1 << 31)]),
    "hdf5: something else": (not_hdf5, ["c.h5"]),
    "hdf5: no such dataset": (hdf5(np.ones((2, 2), np.int32), "tokens"), ["c.h5", "tokens"]),
    "hdf5: floats": (hdf5(np.ones((2, 2))), ["c.h5", "ids"]),
    "hdf5: three axes": (hdf5(np.ones((2, 2, 2), np.int32)), ["c.h5", "ids"]),
}


@pytest.mark.parametrize("name", CORPORA)
def test_corpus(name, tmp_path):
    write, words = CORPORA[name]
    options = write(tmp_path)
    job, _ = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus="unused", corpus_options=options)
    run_broken(tmp_path, harness.INPUT, words, job)


# ---------------------------------------------------------------- jobs

def change(*path, to=...):
    """Sets a key of the job, or deletes it where `to` is left out."""
    def edit(job):
        for key in path[:-1]:
            job = job[key]
        if to is ...:
            del job[path[-1]]
        else:
            job[path[-1]] = to
    return edit


def capture(**keys):
    return change("captures", "c", to={"values": ["layer_output"], **keys})


JOBS = {
    "an unknown section": (change("modell", to={}), ["modell", "\"model\""]),
    "an unknown key": (change("store", "chunk_row", to=5), ["chunk_row", "\"chunk_rows\""]),
    "an unknown key of a capture": (capture(layer=[1]), ["captures.c", "\"layer\"", "\"layers\""]),
    "no model": (change("model"), ["model"]),
    "no checkpoint": (change("model", "checkpoint"), ["model.checkpoint"]),
    "no corpus": (change("corpus"), ["corpus"]),
    "no store": (change("store"), ["store"]),
    "no captures": (change("captures", to={}), ["captures"]),
    "captures in a list": (change("captures", to=[]), ["captures"]),
    "a load dtype that is none": (change("model", "dtype", to="float64"), ["model.dtype", "float64"]),
    "a device that is none": (change("model", "device", to="tpu"), ["model.device", "tpu"]),
    "a corpus format that is none": (change("corpus", "format", to="parquet"), ["corpus.format", "parquet"]),
    "a context of nothing": (change("corpus", "context", to=0), ["corpus.context", "0"]),
    "a context that is no whole number": (change("corpus", "context", to=1.5), ["corpus.context", "1.5"]),
    "a limit below zero": (change("corpus", "limit", to=-3), ["corpus.limit", "-3"]),
    "more to prepend than the context holds": (change("corpus", "prepend", to=list(range(40))), ["corpus.prepend"]),
    "chunks of no rows": (change("store", "chunk_rows", to=0), ["store.chunk_rows"]),
    "a compression level that is none": (change("store", "compression", to=99), ["store.compression", "99"]),
    "threads below one": (change("run", to={"threads": 0}), ["run.threads"]),
    "a capture's name with a slash": (change("captures", "a/b", to={"values": ["logits"]}), ["a/b"]),
    "a capture's name that the store needs": (change("captures", "sequences", to={"values": ["logits"]}), ["sequences"]),
    "no values": (capture(values=[]), ["captures.c.values"]),
    "an unknown value": (capture(values=["layer_outputs"]), ["layer_outputs", "\"layer_output\""]),
    "an unknown value of a host": (capture(values=["linear_attn/stats"]), ["linear_attn/stats", "linear_attn/state"]),
    "a glob of nothing": (capture(values=["mixer/*"]), ["mixer/*"]),
    "a value that the family lacks": (capture(values=["layer_mid"]), ["layer_mid", "one sublayer"]),
    "a value of another kind of block": (capture(values=["self_attn/attention_scores"]), ["self_attn/attention_scores"]),
    "a value of an MLP": (capture(values=["mlp/router_logits"]), ["mlp/router_logits"]),
    "a glob of values that the family lacks": (capture(values=["mlp/*"]), ["mlp/*"]),
    "a layer too many": (capture(layers=[3]), ["captures.c.layers", "3"]),
    "a layer too far from the end": (capture(layers=[-4]), ["captures.c.layers", "-4"]),
    "a range past the end": (capture(layers="1-7"), ["captures.c.layers", "7"]),
    "a range backwards": (capture(layers="2-1"), ["captures.c.layers"]),
    "a step of nothing": (capture(layers="0-2:0"), ["captures.c.layers", "0-2:0"]),
    "an unknown kind of layer": (capture(layers=["mambo"]), ["mambo", "mamba"]),
    "a kind that the model lacks": (capture(layers=["sliding"]), ["sliding"]),
    "no layers": (capture(layers=[]), ["captures.c.layers"]),
    "an unknown position": (capture(positions="middle"), ["captures.c.positions", "middle"]),
    "two kinds of positions": (capture(positions={"first": 1, "every": 2}), ["first", "every"]),
    "a stride of nothing": (capture(positions={"every": 0}), ["every"]),
    "a sample of more than all": (capture(positions={"sample": 1.5}), ["sample", "1.5"]),
    "a capture dtype that is none": (capture(dtype="int8"), ["captures.c.dtype", "int8"]),
}


@pytest.mark.parametrize("name", JOBS)
def test_job(name, tmp_path):
    edit, words = JOBS[name]
    job, _ = harness.case_job(tmp_path, "mamba", captures={"c": {"values": ["layer_output"]}})
    held = json.loads(job.read_text())
    edit(held)
    job.write_text(json.dumps(held))
    run_broken(tmp_path, harness.USAGE, ["job.json", *words], job)


JOB_TEXTS = {
    "empty": (b"", []),
    "not JSON": (b"captures: all", []),
    "cut short": (b'{"model": {"checkpoint": "x"', []),
    "text after the end": (b"{} {}", []),
    "a key twice": (b'{"model": {}, "model": {}}', ["model"]),
    "a list": (b"[]", []),
    "deep nesting": (b'{"model":' + b"[" * 100000, []),
    "a byte of zero": (b'{"model\x00": {}}', []),
    "bytes that are not UTF-8": (b'{"model": "\xff\xfe"}', []),
    "a number that is none": (b'{"model": {"checkpoint": NaN}}', []),
}


@pytest.mark.parametrize("name", JOB_TEXTS)
def test_job_text(name, tmp_path):
    data, words = JOB_TEXTS[name]
    (tmp_path / "job.json").write_bytes(data)
    run_broken(tmp_path, harness.USAGE, ["job.json", *words], tmp_path / "job.json")


def test_a_job_that_is_not_there(tmp_path):
    run_broken(tmp_path, harness.USAGE, ["nowhere.json"], tmp_path / "nowhere.json")


SETS = {
    "an unknown key": ("store.chunkrows=5", ["chunkrows"]),
    "a key of nothing": (".path=5", [".path=5"]),
    "a value of the wrong kind": ("store.chunk_rows=many", ["store.chunk_rows", "many"]),
    "a key under a text": ("store.path.x=1", ["store.path"]),
}


@pytest.mark.parametrize("name", SETS)
def test_set(name, tmp_path):
    change_of, words = SETS[name]
    job, store = harness.case_job(tmp_path, "mamba")
    outcome = harness.actdump("run", job, "--set", change_of).expect(harness.USAGE)
    assert all(word in outcome.err for word in words), outcome.err
    assert not store.exists()


def test_a_store_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    job, _ = harness.case_job(tmp_path, "mamba", store="file/store")
    outcome = harness.actdump("run", job)
    assert outcome.status in (harness.USAGE, harness.INPUT, harness.RESOURCE) and f"{tmp_path}/file" in outcome.err


def test_cuda_where_there_is_none(tmp_path):
    """A build without CUDA, or a machine without a device, says so."""
    job, store = harness.case_job(tmp_path, "mamba", model_options={"device": "cuda"})
    outcome = harness.actdump("run", job, env={"CUDA_VISIBLE_DEVICES": ""}).expect(harness.DEVICE)
    assert "cuda" in outcome.err.lower()
    assert not harness.looks_whole(store)
