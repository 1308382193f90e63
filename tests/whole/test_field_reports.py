"""Faults that users of other activation dumpers met: the kinds that no other test here shows already.

tests/field-reports.md lists all of them, each with its tests or with the reason why it has none; the first tests hold
that table to the tests that are there."""
import ctypes
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import struct
import subprocess
import sys

import h5py
import hdf5plugin
import numpy as np
import pytest

import harness
from test_ranks import assert_close

TABLE = harness.ROOT / "tests/field-reports.md"
# The reports' own numbering, with its gaps.
NUMBERS = {"A": (*range(1, 11), 12, 13, 15, 16), "B": range(1, 9), "C": range(2, 10), "D": (*range(1, 8), *range(9, 21)),
           "E": (*range(1, 8), 9), "F": (1, *range(3, 12)), "S": (*range(2, 7), *range(8, 16))}
MISSING = {"A11", "C1", "D8", "E8", "F2", "S1", "S7"}
IDS = [f"{letter}{n}" for letter, numbers in NUMBERS.items() for n in numbers]
FOLDERS = {"unit": "tests/unit", "whole": "tests/whole", "python": "python/tests"}
TEST = re.compile(r"`(unit|whole|python)/(test_\w+\.(?:c|py)):(test_\w+)(?:\[([^\]]+)\])?`")


# ---------------------------------------------------------------- the table

def table():
    """[(id, fault, what actdump does, tests or the reason)]"""
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    rows = [tuple(cell.strip() for cell in line.strip().strip("|").split(" | ")) for line in lines]
    assert all(len(row) == 4 for row in rows), [row for row in rows if len(row) != 4]
    return rows


def test_every_report_has_one_row():
    ids = [row[0] for row in table()]
    assert ids == IDS
    assert len(set(ids)) == len(ids) and not MISSING & set(ids)


def test_every_row_names_tests_that_exist_or_says_why_there_is_none():
    named = 0
    for number, fault, does, shown in table():
        tests = TEST.findall(shown)
        assert shown.count("`") == 2 * len(tests), f"{number}: something in {shown} does not read as a test"
        assert fault and does and (tests or re.match(r"none: \w.{20,}", shown)), number
        for folder, file, name, row in tests:
            text = (harness.ROOT / FOLDERS[folder] / file).read_text()
            head = rf"^static void {name}\(" if folder == "unit" else rf"^def {name}\("
            assert re.search(head, text, re.MULTILINE), f"{number}: {folder}/{file} has no {name}"
            assert f'"{row}"' in text or not row, f"{number}: {folder}/{file} has no row {row}"
            named += 1
    assert named > len(IDS)


# ---------------------------------------------------------------- tokens, padding, alignment

STREAM = {"stream": {"values": ["layer_output"], "layers": "all"}}


def run(folder, corpus, case="mamba", captures=None, **options):
    """A store over a corpus; corpus: a Megatron pair, or "" where corpus_options say it all."""
    folder.mkdir(exist_ok=True)
    options.setdefault("checkpoint", harness.FIXTURES / case)
    options.setdefault("run", {"threads": 1})
    job, store = harness.make_job(folder, corpus=corpus, captures=captures or STREAM, **options)
    harness.actdump("run", job).expect(harness.OK)
    return store


def test_padding_on_either_side_leaves_the_values_of_no_padding(tmp_path):
    """A4, B1, B2: padding is never run, so that its side and its amount cannot show, in no bit. Id 0 is a token too."""
    documents = [np.array(d) for d in ([5, 0, 9], [7, 8, 0, 11, 12, 13], [4], [6, 3, 0, 0, 2])]
    captures = {"stream": {"values": ["layer_output", "linear_attn/state*", "next_token_probs"], "layers": "all"}}
    plain = run(tmp_path / "plain", harness.write_corpus(tmp_path / "tokens", 2 * documents), "bamba", captures, context=9)
    rows = [np.pad(d, (9 - len(d), 0)) for d in documents] + [np.pad(d, (0, 9 - len(d))) for d in documents]
    np.save(tmp_path / "rows.npy", np.array(rows))
    padded = run(tmp_path / "padded", "", "bamba", captures, context=9,
                 corpus_options={"format": "npy", "path": str(tmp_path / "rows.npy"), "pad": 0})
    got, wanted = (harness.read_values(store, "stream") for store in (padded, plain))
    assert got.keys() == wanted.keys() and len(got["rows/position"]) == 30
    for path, values in wanted.items():
        assert np.array_equal(got[path], values), path


def test_names_of_the_stream_say_where_it_is(tmp_path):
    """A7: the first block's input is the embedding, a block's output is the next one's input, and the last one's is not
    the normed one: that has a name of its own, and follows from the norm's weight."""
    values = harness.read_values(harness.run_case(tmp_path, "mamba"))
    assert np.array_equal(values["layers/0/layer_input"], values["token_embeddings"])
    for layer in (0, 1):
        assert np.array_equal(values[f"layers/{layer}/layer_output"], values[f"layers/{layer + 1}/layer_input"])
    last, normed = values["layers/2/layer_output"].astype(np.float64), values["final_norm_output"]
    assert np.abs(last - normed).max() > 0.1
    weight = harness.read_safetensors(harness.FIXTURES / "mamba/model.safetensors")["backbone.norm_f.weight"][1]
    epsilon = json.loads((harness.FIXTURES / "mamba/config.json").read_text())["layer_norm_epsilon"]
    wanted = last / np.sqrt((last**2).mean(-1, keepdims=True) + epsilon) * weight
    np.testing.assert_allclose(normed, wanted, rtol=1e-4, atol=1e-5)


def by_place(store):
    """{(document, position in it): row of the last layer's stream}, one for each row."""
    values = harness.read_values(store, "stream")
    with harness.open_store(store) as file:
        document, start = file["sequences/document"][...], file["sequences/start"][...]
    sequence = values["rows/sequence"]
    places = list(zip(document[sequence].tolist(), (start[sequence] + values["rows/position"]).tolist()))
    assert len(set(places)) == len(places)
    return {place: (i, row) for place, i, row in
            zip(places, values["rows/input_ids"].tolist(), values["layers/2/layer_output"])}


def test_rows_are_the_same_by_document_and_position_in_any_order_and_batch(tmp_path):
    """A8, A9: one sequence a batch in the corpus's order, against all in one batch, shuffled."""
    lengths = np.random.default_rng(21).integers(1, 30, 16)
    documents = harness.random_documents(22, lengths)
    corpus = harness.write_corpus(tmp_path / "tokens", documents)
    one = by_place(run(tmp_path / "one", corpus, run={"batch_tokens": 30, "threads": 1}))
    shuffled = by_place(run(tmp_path / "shuffled", corpus, corpus_options={"shuffle_seed": 5},
                            run={"batch_tokens": 1024, "threads": 1}))
    assert one.keys() == shuffled.keys() == {(d, p) for d, n in enumerate(lengths) for p in range(n)}
    assert list(one) != list(shuffled)
    for (document, position), (token, row) in one.items():
        assert token == shuffled[document, position][0] == documents[document][position]
        assert_close(f"document {document}, position {position}", shuffled[document, position][1], row)


def test_documents_with_a_common_beginning_have_all_their_rows(tmp_path):
    """A10: nothing is taken from another sequence's beginning; both have it, with the same values."""
    common = harness.random_documents(23, [20])[0]
    documents = [np.append(common, [1, 2, 3]), np.append(common, [4]), common]
    store = run(tmp_path, harness.write_corpus(tmp_path / "tokens", documents), "jamba")
    values = harness.read_values(store, "stream")
    rows = [values["layers/3/layer_output"][values["rows/sequence"] == k] for k in range(3)]
    assert [len(r) for r in rows] == [23, 21, 20]
    for other in rows[1:]:
        assert_close("the common beginning", other[:20], rows[0][:20])


def test_a_limit_beyond_the_corpus_repeats_nothing(tmp_path):
    """A15, S2: a corpus shorter than what was asked for is run once, and the store says how much there was."""
    documents = harness.random_documents(24, [9, 5, 0, 12])
    corpus = harness.write_corpus(tmp_path / "tokens", documents)
    store = run(tmp_path, corpus, captures={"ids": {"values": ["input_ids"]}}, corpus_options={"limit": 1000})
    with harness.open_store(store) as file:
        assert file["ids/rows/input_ids"][...].tolist() == [int(t) for d in documents for t in d]
    held = harness.manifest(store)["corpus"]
    assert (held["n_sequences"], held["n_tokens"], held["n_empty_documents"], held["limit"]) == (3, 26, 1, 1000)
    assert "3 sequences, 26 tokens" in harness.actdump("info", store).expect(harness.OK).out


def test_a_store_needs_nothing_but_itself(tmp_path):
    """A16, S3: with the checkpoint, the corpus and the job file gone, it explains, checks and indexes itself."""
    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "inputs/model")
    corpus = harness.write_corpus(tmp_path / "inputs/tokens", harness.random_documents(25, [9, 5]))
    captures = {"stream": {"values": ["layer_output"], "layers": [1], "positions": {"skip_first": 1}}}
    store = run(tmp_path / "inputs", corpus, captures=captures, checkpoint=checkpoint)
    asked = json.loads((tmp_path / "inputs/job.json").read_text())
    shutil.move(tmp_path / "inputs/store", tmp_path / "store")
    shutil.rmtree(tmp_path / "inputs")
    (tmp_path / "store/store.h5").unlink()
    for name in ("index", "verify", "info"):
        shown = harness.actdump(name, tmp_path / "store").expect(harness.OK)
    assert "stream" in shown.out and str(checkpoint) in shown.out
    held = harness.manifest(tmp_path / "store")
    assert held["job"]["captures"] == asked["captures"] and held["job"]["corpus"]["context"] == 32
    assert re.fullmatch("[0-9a-f]{32}", held["model"]["digest"]) and re.fullmatch("[0-9a-f]{32}", held["corpus"]["digest"])


# ---------------------------------------------------------------- what a store says of how it was made

def test_isolation_and_what_decides_rounding_are_recorded(tmp_path):
    """B8, C4, S6."""
    corpus = harness.write_corpus(tmp_path / "tokens", harness.random_documents(26, [40]))
    said = []
    for carry in (False, True):
        store = run(tmp_path / str(carry), corpus, corpus_options={"carry": carry}, run={"batch_tokens": 48, "threads": 1})
        held = harness.manifest(store)
        assert held["corpus"]["carry"] == carry
        said.append(held["corpus"]["isolation"])
        assert {k: held["run"][k] for k in ("tf32", "batch_tokens", "threads")} == {
            "tf32": False, "batch_tokens": 48, "threads": 1}
        assert "cpu" in held["run"]["backend"] and held["model"]["load_dtype"] == "float32"
        with harness.open_store(store) as file:
            assert file["sequences/continues"][...].tolist() == [0, int(carry)]
    assert said[0] != said[1] and "sequences:" in said[0] and "documents:" in said[1]


def test_states_at_chosen_positions_are_billed_beforehand(tmp_path):
    """B7: states of every eighth token are those rows of all states, and plan's raw bytes are what was written."""
    corpus = harness.write_corpus(tmp_path / "tokens", harness.random_documents(27, [30, 7, 17]))
    captures = {"all": {"values": ["linear_attn/states"], "layers": [1]},
                "some": {"values": ["linear_attn/states"], "layers": [1], "positions": {"every": 8}}}
    store = run(tmp_path, corpus, captures=captures)
    every, some = (harness.read_values(store, c) for c in ("all", "some"))
    chosen = every["rows/position"] % 8 == 0
    assert some["rows/position"].tolist() == [0, 8, 16, 24, 0, 0, 8, 16]
    path = "layers/1/linear_attn/states"
    assert np.array_equal(some[path], every[path][chosen])
    out = harness.actdump("plan", tmp_path / "job.json").expect(harness.OK).out
    billed = int(re.search(r"total: (\d+) bytes raw", out)[1])
    assert billed == sum(v[path].nbytes for v in (every, some))


# ---------------------------------------------------------------- numbers

def test_every_kind_of_bfloat16_comes_through(tmp_path):
    """C3: zeros, subnormal and largest numbers, infinities and NaN: raw bits as in the checkpoint, float32 as by hand."""
    kinds = [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC1, 0x3F80, 0x3F81]

    def edit(tensors):
        dtype, array = tensors["backbone.embeddings.weight"]
        assert dtype == "BF16"
        array = array.copy()
        array[5, :len(kinds)] = kinds
        tensors["backbone.embeddings.weight"] = (dtype, array)

    checkpoint = harness.copy_checkpoint("mamba-bf16", tmp_path / "model", tensors=edit)
    corpus = harness.write_corpus(tmp_path / "tokens", [[5, 6]])
    store = run(tmp_path, corpus, captures={"c": {"values": ["token_embeddings"]}}, checkpoint=checkpoint)
    with harness.open_store(store) as file:
        data = file["c/token_embeddings"]
        bits = np.empty(data.shape, np.uint16)
        data.id.read(h5py.h5s.ALL, h5py.h5s.ALL, bits, mtype=data.id.get_type())
        values = data[...]
    assert bits[0, :len(kinds)].tolist() == kinds
    by_hand = (bits.astype(np.uint32) << 16).view(np.float32)
    assert values.dtype == np.float32 and np.array_equal(values, by_hand, equal_nan=True)
    assert np.array_equal(np.signbit(values[0, :2]), [False, True])


ROUTERS = {"jamba": "model.layers.{}.feed_forward.router.weight", "laguna": "model.layers.{}.mlp.gate.weight"}


@pytest.mark.parametrize("case", ROUTERS)
def test_router_logits_are_before_any_softmax_or_sigmoid(case, tmp_path):
    """C8, F8: the product with the router's weight and nothing more, under the number of its own layer."""
    store = harness.run_case(tmp_path, case, captures={"everything": {"values": ["mlp_input", "mlp/router_logits"]}})
    tensors = {}
    for shard in (harness.FIXTURES / case).glob("*.safetensors"):
        tensors.update(harness.read_safetensors(shard))
    values = harness.read_values(store)
    layers = [i for i in range(5) if f"layers/{i}/mlp/router_logits" in values]
    assert layers == {"jamba": [1, 3], "laguna": [1, 2, 3, 4]}[case]
    for layer in layers:
        logits = values[f"layers/{layer}/mlp/router_logits"]
        weight = tensors[ROUTERS[case].format(layer)][1].astype(np.float64)
        np.testing.assert_allclose(logits, values[f"layers/{layer}/mlp_input"] @ weight.T, rtol=1e-4, atol=1e-4)
        assert (logits < 0).any() and not np.allclose(logits.sum(-1), 1)


# ---------------------------------------------------------------- files

CREATED, MODIFIED, MOVED_TO = 0x100, 0x2, 0x80  # inotify(7)


class Watch:
    """What happens to the names in some folders."""

    def __init__(self, *folders):
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_NONBLOCK)
        if self.fd < 0 or any(libc.inotify_add_watch(self.fd, os.fsencode(f), CREATED | MODIFIED | MOVED_TO) < 0
                              for f in folders):
            pytest.skip(f"inotify does not work here: {os.strerror(ctypes.get_errno())}")

    def take(self):
        """{name: [what happened, ...]}"""
        happened = {}
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                os.close(self.fd)
                return happened
            at = 0
            while at < len(data):
                _, what, _, size = struct.unpack_from("iIII", data, at)
                name = data[at + 16:at + 16 + size].rstrip(b"\0").decode()
                happened.setdefault(name, []).append(what)
                at += 16 + size


def test_every_file_is_written_by_one_rank_under_another_name(tmp_path):
    """D7, D19, E1, S9, S11: no name of the store is ever created or written to: it comes into being whole, by a rename,
    and each temporary name is one process's alone."""
    documents = harness.random_documents(28, [16] * 10)
    corpus = harness.write_corpus(tmp_path / "tokens", documents)
    job, store = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, captures=STREAM,
                                  store_options={"unit_tokens": 32}, run={"threads": 1})
    (store / "segments").mkdir(parents=True)
    watch = Watch(store, store / "segments")
    harness.actdump("run", job, ranks=3).expect(harness.OK)
    happened = watch.take()
    final = {name: what for name, what in happened.items() if not name.startswith(".") and name != "store.lock"}
    assert sorted(final) == [f"{i:06}.h5" for i in range(5)] + ["store.h5", "store.json"]
    assert all(set(what) == {MOVED_TO} for what in final.values()), final
    assert all(final[f"{i:06}.h5"] == [MOVED_TO] for i in range(5))
    temporary = [name for name in happened if name.startswith(".") and re.search(r"\d{6}\.h5", name)]
    assert len(temporary) == 5 and all(happened[name].count(CREATED) == 1 for name in temporary)


def test_locks_of_the_file_system_do_not_matter_to_hdf5_files(mamba_store, tmp_path):
    """D9: files that someone else has locked, as a mount without working locks makes them look, are read all the same."""
    store = shutil.copytree(mamba_store, tmp_path / "store")
    with (store / "store.h5").open("rb") as index, harness.segments(store)[0].open("rb") as segment:
        for file in (index, segment):
            fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError):
            h5py.File(store / "store.h5", locking=True)
        environment = {"HDF5_USE_FILE_LOCKING": None}
        harness.actdump("verify", store, env=environment).expect(harness.OK)
        harness.actdump("index", store, env=environment).expect(harness.OK)
    harness.actdump("verify", store).expect(harness.OK)


def test_the_lines_that_info_prints_run(mamba_store):
    """D11: the filter's plugin is imported before reading; a fresh Python without any setting reads by these lines."""
    out = harness.actdump("info", mamba_store).expect(harness.OK).out
    lines = [line.strip() for line in out.partition("To read it in Python")[2].splitlines()[1:] if line.strip()]
    assert lines[0] == "import h5py, hdf5plugin" and len(lines) >= 3
    program = "\n".join([*lines, "assert len(values) == len(tokens) > 0"])
    environment = harness.environment(HDF5_PLUGIN_PATH=None)
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)
    assert harness.manifest(mamba_store)["compression"]["filters"] == [2, 32015]
    without = program.replace(", hdf5plugin", "", 1)
    assert subprocess.run([sys.executable, "-c", without], env=environment, capture_output=True).returncode != 0


def rows_of_segments(arguments):
    """A reader's share of the segments: [(first row, rows)]. The file is opened in the process that reads it."""
    store, share, of = arguments
    import h5py as reader  # also where this module has been imported in a process of its own
    found, first = [], 0
    for number, record in enumerate(harness.manifest(store)["segments"]):
        if number % of == share:
            with reader.File(store / record["file"]) as file:
                found.append((first, file["stream/layers/1/layer_output"][...]))
        first += record["rows"]["stream"]
    return found


@pytest.fixture(scope="module")
def five_segments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("five")
    corpus = harness.write_corpus(folder / "tokens", harness.random_documents(29, [16, 11] * 5))
    store = run(folder, corpus, store_options={"unit_tokens": 27})
    assert len(harness.segments(store)) == 5
    return store


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_readers_in_several_processes_share_the_segments(method, five_segments):
    """D12, S8: four readers of five segments together have every row once, in the place that store.json gives it."""
    n = 4 if method == "fork" else 2
    with multiprocessing.get_context(method).Pool(n) as pool:
        shares = pool.map(rows_of_segments, [(five_segments, k, n) for k in range(n)], chunksize=1)
    parts = sorted((part for share in shares for part in share), key=lambda part: part[0])
    with harness.open_store(five_segments) as file:
        whole = file["stream/layers/1/layer_output"][...]
    assert [first for first, _ in parts] == np.cumsum([0] + [len(rows) for _, rows in parts])[:-1].tolist()
    assert np.array_equal(np.concatenate([rows for _, rows in parts]), whole)


def test_single_rows_across_the_borders_of_segments(five_segments):
    """S5: each row by itself through store.h5 is that row of its segment."""
    rows = np.concatenate([rows for _, rows in rows_of_segments((five_segments, 0, 1))])
    with harness.open_store(five_segments) as file:
        data = file["stream/layers/1/layer_output"]
        assert len(data) == len(rows) == 135
        for border in range(27, 135, 27):
            for row in (border - 1, border, border + 1):
                assert np.array_equal(data[row], rows[row])
            assert np.array_equal(data[border - 3:border + 3], rows[border - 3:border + 3])


def test_metadata_of_any_size(tmp_path):
    """D13: a job of more than the 64 KiB that an HDF5 attribute holds is kept whole."""
    wanted = list(range(0, 40000, 2))
    corpus = harness.write_corpus(tmp_path / "tokens", harness.random_documents(30, [9]))
    captures = {"c": {"values": ["input_ids"], "positions": {"list": wanted}}}
    store = run(tmp_path, corpus, captures=captures)
    assert (tmp_path / "job.json").stat().st_size > 1 << 17
    assert harness.manifest(store)["job"]["captures"]["c"]["positions"]["list"] == wanted
    with harness.open_store(store) as file:
        assert file["c/rows/position"][...].tolist() == [0, 2, 4, 6, 8]
    harness.actdump("verify", store).expect(harness.OK)
    assert "nothing to do" in harness.actdump("run", tmp_path / "job.json").expect(harness.OK).err


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_rows_that_just_fill_units_and_chunks(more, tmp_path):
    """D15, S4: no segment of nothing after an exact multiple, no rows of zeros after another number."""
    lengths = [16] * 7 + [16 + more]
    documents = [d + 1 for d in harness.random_documents(31, lengths, 96)]
    corpus = harness.write_corpus(tmp_path / "tokens", documents)
    store = run(tmp_path, corpus, store_options={"unit_tokens": 32, "chunk_rows": 16})
    records = harness.manifest(store)["segments"]
    assert [r["rows"]["stream"] for r in records] == [32, 32, 32, *([16, 17] if more == 1 else [32 + more])]
    assert len(harness.segments(store)) == len(records)
    with h5py.File(harness.segments(store)[-1]) as file:
        data = file["stream/layers/0/layer_output"]
        assert len(data) == records[-1]["rows"]["stream"] and data.id.get_num_chunks() == 2
    values = harness.read_values(store, "stream")
    assert values["rows/input_ids"].tolist() == [int(t) for d in documents for t in d]
    assert np.abs(values["layers/0/layer_output"]).max(-1).min() > 0


def test_the_byte_shuffle_pays(tmp_path):
    """D17: bfloat16 rows take less room as actdump writes them by default than by zstd alone. In chunks of several of
    zstd's blocks, as real models' are: within one block all bytes share a table."""
    corpus = harness.write_corpus(tmp_path / "tokens", harness.random_documents(32, [32] * 128))
    captures = {"c": {"values": ["logits"], "dtype": "bfloat16"}}
    store = run(tmp_path, corpus, captures=captures, store_options={"chunk_rows": 4096})
    with h5py.File(harness.segments(store)[0]) as file, h5py.File(tmp_path / "plain.h5", "w") as other:
        data = file["c/logits"]
        bits = np.empty(data.shape, np.uint16)
        data.id.read(h5py.h5s.ALL, h5py.h5s.ALL, bits, mtype=data.id.get_type())
        plain = other.create_dataset("x", data=bits, chunks=data.chunks, **hdf5plugin.Zstd(clevel=1))
        ours, theirs = data.id.get_storage_size(), plain.id.get_storage_size()
    assert harness.manifest(store)["compression"] == {"level": 1, "filters": [2, 32015]}
    assert ours < 0.95 * theirs < theirs < 1.05 * bits.nbytes


def test_plan_warns_of_too_many_files(tmp_path):
    """D20."""
    corpus = harness.write_corpus(tmp_path / "tokens", [[1]] * 4097)
    job, _ = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, captures=STREAM,
                              store_options={"unit_tokens": 1})
    assert "many files: with store.unit_tokens" in harness.actdump("plan", job).expect(harness.OK).out
    few = harness.actdump("plan", job, "--set", "store.unit_tokens=2").expect(harness.OK).out
    assert "many files" not in few and "2049 segments" in few


# ---------------------------------------------------------------- configs

def older(config):
    """The spellings of transformers 4: the same model."""
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters", None)
    if config["model_type"] == "bamba":
        config["rope_theta"] = rope["rope_theta"]
        config["time_step_limit"] = [0.0, float("inf")]  # written as a bare Infinity
        config["mamba_d_head"] = "auto"
    config["transformers_version"] = "4.45.0"
    config["a_key_of_someone_else"] = {"x": [1, None]}


@pytest.mark.parametrize("case", ["bamba", "jamba"])
def test_old_and_new_spellings_of_a_config_give_the_same_rows(case, tmp_path):
    """F3, F4: bit for bit; and keys that are nobody's do not matter."""
    corpus = harness.write_corpus(tmp_path / "tokens", harness.random_documents(33, [20, 9]))
    checkpoint = harness.copy_checkpoint(case, tmp_path / "model", config=older)
    if case == "bamba":
        assert "Infinity]" in (checkpoint / "config.json").read_text()
    new = run(tmp_path / "new", corpus, case)
    old = run(tmp_path / "old", corpus, case, checkpoint=checkpoint)
    assert harness.segment_bytes(old) == harness.segment_bytes(new)
    assert harness.manifest(old)["model"]["digest"] != harness.manifest(new)["model"]["digest"]


def test_the_router_of_a_dense_jamba_is_refused_by_name(tmp_path):
    """F7: with one expert there is no router; that is said when the job is read, not met during a forward."""
    job, store = harness.case_job(tmp_path, "jamba-dense-tied", captures={"r": {"values": ["mlp/router_logits"]}})
    outcome = harness.actdump("run", job).expect(harness.USAGE)
    assert "mlp/router_logits" in outcome.err and "dense" in outcome.err and "no router" in outcome.err
    assert not store.exists()
