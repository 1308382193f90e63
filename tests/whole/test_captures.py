"""What a capture keeps: positions, layers, values and dtypes, held against the golden arrays indexed by NumPy."""
import h5py
import numpy as np
import pytest

import harness
from golden import Golden

DOCUMENTS = harness.case_documents("mamba")
LENGTHS = [len(d) for d in DOCUMENTS]  # 13, 1, 21, 3
PATH = "layers/1/layer_output"


@pytest.fixture(scope="module")
def golden():
    values = Golden(harness.FIXTURES / "mamba/golden.h5")
    yield values
    values.close()


def run(folder, captures, case="mamba", **options):
    return harness.run_case(folder, case, captures=captures, **options)


def rows_of(store, capture):
    """[(sequence, position)] of a capture's rows, in their order."""
    with harness.open_store(store) as file:
        rows = file[capture]["rows"]
        ids = rows["input_ids"][...]
        places = list(zip(rows["sequence"][...].tolist(), rows["position"][...].tolist()))
    assert [DOCUMENTS[s][p] for s, p in places] == ids.tolist()
    return places


def every(n, offset=0):
    return lambda length: range(offset, length, n)


# Name: the keys of a capture, and the positions that they keep of a sequence of `length` tokens (before skip_ids).
POSITIONS = {
    "absent": ({}, range),
    "all": ({"positions": "all"}, range),
    "last": ({"positions": "last"}, lambda n: [n - 1]),
    "first": ({"positions": {"first": 3}}, lambda n: range(min(n, 3))),
    "every": ({"positions": {"every": 5}}, every(5)),
    "every from an offset": ({"positions": {"every": 5, "offset": 4}}, every(5, 4)),
    "list": ({"positions": {"list": [20, 0, 7, 7]}}, lambda n: [p for p in (0, 7, 20) if p < n]),
    "list from the end": ({"positions": {"list": [0, -1, -3]}}, lambda n: sorted({p for p in (0, n - 1, n - 3) if p >= 0})),
    "skip_first": ({"positions": {"skip_first": 2}}, lambda n: range(2, n)),
    "skip_first of a stride": ({"positions": {"every": 4, "skip_first": 5}}, lambda n: [p for p in range(0, n, 4) if p >= 5]),
    "skip_first beside positions": ({"positions": "all", "skip_first": 12}, lambda n: range(12, n)),
}


def test_positions(golden, tmp_path):
    """Each kind in a capture of its own, all in one run: captures do not disturb each other either."""
    names = {f"c{i}": name for i, name in enumerate(POSITIONS)}
    captures = {c: {"values": ["layer_output"], "layers": [1], **POSITIONS[name][0]} for c, name in names.items()}
    store = run(tmp_path, captures)
    for c, name in names.items():
        wanted = [(k, p) for k, n in enumerate(LENGTHS) for p in POSITIONS[name][1](n)]
        assert rows_of(store, c) == wanted, name
        with harness.open_store(store) as file:
            np.testing.assert_allclose(file[c][PATH][...], golden.rows(PATH, wanted), rtol=1e-4, atol=1e-4, err_msg=name)


def test_skip_ids(golden, tmp_path):
    skipped = [int(DOCUMENTS[0][0]), int(DOCUMENTS[2][20])]
    store = run(tmp_path, {"kept": {"values": ["layer_output"], "layers": [1], "positions": {"skip_ids": skipped}}})
    wanted = [(k, p) for k, d in enumerate(DOCUMENTS) for p in range(len(d)) if d[p] not in skipped]
    assert len(wanted) < sum(LENGTHS)
    assert rows_of(store, "kept") == wanted
    with harness.open_store(store) as file:
        np.testing.assert_allclose(file["kept"][PATH][...], golden.rows(PATH, wanted), rtol=1e-4, atol=1e-4)


def test_a_capture_may_keep_no_row(tmp_path):
    captures = {"none": {"values": ["layer_output"], "layers": [0], "positions": {"list": [30]}},
                "some": {"values": ["layer_output"], "layers": [0]}}
    store = run(tmp_path, captures)
    with harness.open_store(store) as file:
        assert file["none/layers/0/layer_output"].shape == (0, 24)
        assert file["some/layers/0/layer_output"].shape == (sum(LENGTHS), 24)
    harness.actdump("verify", store).expect(harness.OK)


def test_sample(tmp_path):
    """The same seed takes the same rows whatever else is captured; the share is about what was asked for."""
    documents = harness.random_documents(1, [32] * 100)
    corpus = harness.write_corpus(tmp_path / "tokens", documents)

    def sample(seed, name):
        job, store = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, store=name, captures={
            "other": {"values": ["input_ids"]},
            "sampled": {"values": ["input_ids"], "positions": {"sample": 0.2, "seed": seed}}})
        harness.actdump("run", job).expect(harness.OK)
        with harness.open_store(store) as file:
            rows = file["sampled/rows"]
            return set(zip(rows["sequence"][...].tolist(), rows["position"][...].tolist()))

    one, again, other = sample(1, "a"), sample(1, "b"), sample(2, "c")
    assert one == again and one != other
    for taken in (one, other):
        assert 500 < len(taken) < 780  # 640 expected; five standard deviations are 113
        assert len({p for _, p in taken}) == 32 and len({s for s, _ in taken}) > 90
    assert 60 < len(one & other) < 200  # 128 expected: the seeds are independent


LAYERS = {
    "absent": (None, [0, 1, 2, 3, 4]),
    "all": ("all", [0, 1, 2, 3, 4]),
    "list": ([3, 0], [0, 3]),
    "from the end": ([-1, -5], [0, 4]),
    "range": ("1-3", [1, 2, 3]),
    "range with a step": ("0-4:2", [0, 2, 4]),
    "range to the end": ("2--1", [2, 3, 4]),
    "several": ("0,2-3", [0, 2, 3]),
    "sliding": (["sliding"], [1, 2, 3]),
    "full": (["full"], [0, 4]),
    "moe": ("moe", [1, 2, 3, 4]),
    "dense": (["dense"], [0]),
    "attention": (["attention"], [0, 1, 2, 3, 4]),
    "kinds and numbers": (["dense", 2], [0, 2]),
}


def test_layers(tmp_path):
    """laguna: full, sliding, sliding, sliding, full; dense, then four mixtures."""
    names = {f"c{i}": name for i, name in enumerate(LAYERS)}
    captures = {c: {"values": ["layer_output"], **({"layers": LAYERS[name][0]} if LAYERS[name][0] is not None else {})}
                for c, name in names.items()}
    store = run(tmp_path, captures, case="laguna")
    with harness.open_store(store) as file:
        got = {name: sorted(map(int, file[c]["layers"])) for c, name in names.items()}
    assert got == {name: wanted for name, (_, wanted) in LAYERS.items()}


def test_mamba_layers_of_a_mixed_model(tmp_path):
    store = run(tmp_path, {"states": {"values": ["linear_attn/state_output"], "layers": ["mamba"]},
                           "queries": {"values": ["self_attn/attention_queries"], "layers": ["attention"]}}, case="jamba")
    with harness.open_store(store) as file:
        assert list(file["states/layers"]) == ["0", "1", "3"] and list(file["queries/layers"]) == ["2"]


GLOBS = {
    "linear_attn/*": lambda p: p.startswith("linear_attn/"),
    "layer_*": lambda p: p in ("layer_input", "layer_output"),
    "linear_attn/state*": lambda p: p.startswith("linear_attn/state"),
    "*_ids": lambda p: p == "input_ids",
    "*": lambda p: True,
}


def test_globs(golden, tmp_path):
    names = {f"c{i}": glob for i, glob in enumerate(GLOBS)}
    store = run(tmp_path, {c: {"values": [glob], "layers": [1]} for c, glob in names.items()})
    everything = {p.removeprefix("layers/1/") for p in golden.paths() if not p.startswith(("layers/0", "layers/2"))}
    with harness.open_store(store) as file:
        for c, glob in names.items():
            got = {p.removeprefix("layers/1/") for p in harness.value_paths(file[c])}
            assert got == {p for p in everything if GLOBS[glob](p)}, glob


def test_a_glob_takes_what_each_layer_has(tmp_path):
    store = run(tmp_path, {"mlp": {"values": ["mlp/*"], "layers": "all"}}, case="jamba")
    with harness.open_store(store) as file:
        assert "router_logits" in file["mlp/layers/1/mlp"] and "router_logits" not in file["mlp/layers/0/mlp"]
        assert "mlp_neurons" in file["mlp/layers/0/mlp"] and "mlp_neurons" not in file["mlp/layers/1/mlp"]


def test_a_named_value_is_taken_where_it_is(tmp_path):
    """Named together with layers of which some lack it: no error, as long as one has it."""
    store = run(tmp_path, {"routing": {"values": ["mlp/router_logits"], "layers": "all"}}, case="jamba")
    with harness.open_store(store) as file:
        assert list(file["routing/layers"]) == ["1", "3"]


def test_dtypes(golden, tmp_path):
    captures = {dtype: {"values": ["layer_output", "input_ids"], "layers": [1], "dtype": dtype}
                for dtype in ("float32", "float16", "bfloat16")}
    store = run(tmp_path, captures)
    wanted = golden.rows(PATH, [(k, p) for k, n in enumerate(LENGTHS) for p in range(n)])
    with harness.open_store(store) as file:
        exact = file["float32"][PATH][...]
        np.testing.assert_allclose(exact, wanted, rtol=1e-4, atol=1e-4)
        assert file["float16"][PATH].dtype == np.float16
        assert np.array_equal(file["float16"][PATH][...], exact.astype(np.float16))
        kind = file["bfloat16"][PATH].id.get_type()
        assert (kind.get_size(), kind.get_fields(), kind.get_ebias()) == (2, (15, 7, 8, 0, 7), 127)
        assert np.array_equal(file["bfloat16"][PATH][...], round_to_bfloat16(exact))
        for dtype in captures:  # ids stay whole numbers
            assert np.issubdtype(file[dtype]["input_ids"].dtype, np.integer)
            assert file[dtype]["input_ids"][...].tolist() == [int(t) for d in DOCUMENTS for t in d]


def round_to_bfloat16(values):
    """To the nearest, ties to even, as float32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def scale_embeddings(factor):
    def edit(tensors):
        name = next(n for n in tensors if "embed" in n)
        dtype, array = tensors[name]
        tensors[name] = (dtype, array * np.float32(factor))
    return edit


def statistics(store, path):
    """The counts that store.h5 keeps of a dataset."""
    with harness.open_store(store) as file:
        return dict(file["statistics"][path].attrs)


def test_float16_overflow_is_counted_and_said(tmp_path):
    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "checkpoint", tensors=scale_embeddings(1e5))
    captures = {"half": {"values": ["token_embeddings"], "dtype": "float16"}, "full": {"values": ["token_embeddings"]}}
    job, store = harness.case_job(tmp_path, "mamba", checkpoint=checkpoint, captures=captures)
    outcome = harness.actdump("run", job).expect(harness.OK)
    with harness.open_store(store) as file:
        half, full = file["half/token_embeddings"][...], file["full/token_embeddings"][...]
    overflowed = int(np.isinf(half).sum())
    assert 0 < overflowed < half.size
    assert overflowed == int((np.abs(full) >= 65520).sum())
    assert statistics(store, "half/token_embeddings")["n_overflow"] == overflowed
    assert statistics(store, "full/token_embeddings")["n_overflow"] == 0
    assert f"{overflowed}" in outcome.text and "overflow" in outcome.text
    assert "overflow" in harness.actdump("info", store).expect(harness.OK).out


def test_not_a_number_is_counted_and_placed(tmp_path):
    """An embedding row of NaN: its token's rows, and what follows them in the sequence, and no other sequence."""
    token = int(DOCUMENTS[2][5])

    def edit(tensors):
        name = next(n for n in tensors if "embed" in n)
        array = tensors[name][1].copy()
        array[token, 3] = np.nan
        tensors[name] = (tensors[name][0], array)

    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "checkpoint", tensors=edit)
    captures = {"c": {"values": ["token_embeddings", "layer_output"], "layers": [0]}}
    job, store = harness.case_job(tmp_path, "mamba", checkpoint=checkpoint, captures=captures)
    outcome = harness.actdump("run", job).expect(harness.OK)
    seen = [(k, p) for k, d in enumerate(DOCUMENTS) for p in range(len(d)) if d[p] == token]
    assert statistics(store, "c/token_embeddings")["n_nonfinite"] == len(seen)
    assert "not finite" in outcome.text
    with harness.open_store(store) as file:
        bad = np.isnan(file["c/layers/0/layer_output"][...]).any(-1)
        sequence, position = file["c/rows/sequence"][...], file["c/rows/position"][...]
    first = {k: min(p for s, p in seen if s == k) for k in {s for s, _ in seen}}
    assert bad.tolist() == [s in first and p >= first[s] for s, p in zip(sequence, position)]
    job, second = harness.case_job(tmp_path, "mamba", checkpoint=checkpoint, captures=captures, store="second",
                                   run={"on_nonfinite": "stop"})
    stopped = harness.actdump("run", job)
    assert stopped.status == harness.INPUT and "token_embeddings" in stopped.err, stopped.text
    assert not harness.looks_whole(second)


def test_windows_prepend_start_and_limit(tmp_path):
    """The /sequences table, and rows of documents longer than the context."""
    documents = harness.random_documents(8, [10, 25, 0, 7])
    corpus = harness.write_corpus(tmp_path / "tokens", documents)
    job, store = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, context=10,
                                  corpus_options={"prepend": [5], "start": 1, "limit": 4},
                                  captures={"c": {"values": ["input_ids"]}})
    harness.actdump("run", job).expect(harness.OK)
    cut = [(d, at, [5, *documents[d][at:at + 9]]) for d in (0, 1, 3) for at in range(0, len(documents[d]), 9)]
    wanted = cut[1:5]
    with harness.open_store(store) as file:
        table = file["sequences"]
        assert table["document"][...].tolist() == [d for d, _, _ in wanted]
        assert table["start"][...].tolist() == [at for _, at, _ in wanted]
        assert table["length"][...].tolist() == [len(ids) for _, _, ids in wanted]
        assert file["c/rows/input_ids"][...].tolist() == [int(t) for _, _, ids in wanted for t in ids]
        assert file["c/rows/sequence"][...].tolist() == [k for k, (_, _, ids) in enumerate(wanted) for _ in ids]
        assert file["c/rows/position"][...].tolist() == [p for _, _, ids in wanted for p in range(len(ids))]


def test_shuffle_keeps_every_sequence_once(tmp_path):
    documents = harness.random_documents(9, [4, 9, 1, 6, 8, 3, 7])
    corpus = harness.write_corpus(tmp_path / "tokens", documents)
    orders = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        job, store = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, store=name,
                                      corpus_options={"shuffle_seed": seed}, captures={"c": {"values": ["input_ids"]}})
        harness.actdump("run", job).expect(harness.OK)
        with harness.open_store(store) as file:
            order = file["sequences/document"][...].tolist()
            assert file["c/rows/input_ids"][...].tolist() == [int(t) for d in order for t in documents[d]]
        orders.append(order)
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(7)) for order in orders)


CORPORA = {
    "npy of rows": lambda p, a: (np.save(p / "c.npy", a.astype(np.int32)), {"format": "npy", "path": "c.npy"}),
    "npy of rows, big-endian": lambda p, a: (np.save(p / "c.npy", a.astype(">u4")), {"format": "npy", "path": "c.npy"}),
    "npy in one run": lambda p, a: (np.save(p / "c.npy", a.ravel().astype(np.uint8)), {"format": "npy", "path": "c.npy"}),
    "raw uint16": lambda p, a: ((p / "c").write_bytes(a.astype("<u2").tobytes()),
                                {"format": "raw", "path": "c", "dtype": "uint16"}),
    "raw uint32": lambda p, a: ((p / "c").write_bytes(a.astype("<u4").tobytes()),
                                {"format": "raw", "path": "c", "dtype": "uint32"}),
    "hdf5 of rows": lambda p, a: (hdf5(p / "c.h5", a.astype(np.int64)), {"format": "hdf5", "path": "c.h5", "dataset": "x/ids"}),
    "hdf5 in one run": lambda p, a: (hdf5(p / "c.h5", a.ravel().astype(np.uint16)),
                                     {"format": "hdf5", "path": "c.h5", "dataset": "x/ids"}),
    "megatron int32": lambda p, a: (harness.write_corpus(p / "c", a, "<i4", 4), {"format": "megatron", "path": "c"}),
    "megatron int64": lambda p, a: (harness.write_corpus(p / "c", a, "<i8", 5), {"format": "megatron", "path": "c"}),
}


def hdf5(path, array):
    with h5py.File(path, "w") as file:
        file.create_dataset("x/ids", data=array, chunks=True, compression="gzip")


@pytest.mark.parametrize("kind", CORPORA)
def test_corpus_formats(kind, tmp_path):
    """The same eight rows of sixteen tokens in every form give the same rows."""
    ids = np.random.default_rng(2).integers(0, 97, (8, 16))
    _, options = CORPORA[kind](tmp_path, ids)
    job, store = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus="unused", context=16,
                                  corpus_options=options, captures={"c": {"values": ["layer_output"], "layers": [0]}})
    harness.actdump("run", job).expect(harness.OK)
    with harness.open_store(store) as file:
        assert file["sequences/length"][...].tolist() == [16] * 8
        assert file["c/rows/input_ids"][...].tolist() == ids.ravel().tolist()


def test_padding_is_cut_by_the_rows_lengths_never_by_id(tmp_path):
    """Id 0 fills the ends of rows; inside a row it is a token like any other."""
    rows = np.array([[5, 0, 7, 0, 0, 0], [0, 0, 0, 4, 0, 3], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0]])
    np.save(tmp_path / "c.npy", rows)
    job, store = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus="unused", context=6,
                                  corpus_options={"format": "npy", "path": "c.npy", "pad": 0},
                                  captures={"c": {"values": ["input_ids"]}})
    harness.actdump("run", job).expect(harness.OK)
    with harness.open_store(store) as file:
        lengths = file["sequences/length"][...].tolist()
        ids = np.split(file["c/rows/input_ids"][...], np.cumsum(lengths)[:-1])
    assert [i.tolist() for i in ids] == [[5, 0, 7], [4, 0, 3], [1, 2, 3, 4, 5, 6]]
