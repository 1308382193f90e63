"""Reading, held against h5py's own view of store.h5, on stores of all families."""

import json
import pickle
import subprocess
import sys

import h5py
import numpy as np
import pytest

import actdump
import harness
from conftest import FAMILIES


def edit_manifest(store, change):
    info = harness.manifest(store)
    change(info)
    (store / "store.json").write_text(json.dumps(info))


@pytest.mark.parametrize("case", FAMILIES)
def test_every_value_is_what_h5py_reads(stores, case):
    path = stores(case)
    with actdump.open(path) as store, harness.open_store(path) as file:
        assert len(store.segments) > 1 and store.complete
        assert sorted(store.values) == [f"everything/{v}" for v in harness.value_paths(file["everything"])]
        rng = np.random.default_rng(0)
        for name, value in store.values.items():
            whole, attributes = file[name][...], file[name].attrs
            assert value.shape == whole.shape and value.layout == attributes["layout"], name
            assert (value.dtype, value.layer, value.host) == tuple(attributes[k] for k in ("dtype", "layer", "host"))
            assert np.array_equal(value[:], whole, equal_nan=True) and value[:].dtype == whole.dtype, name
            numbers = rng.integers(-len(whole), len(whole), 40)
            assert np.array_equal(value[numbers], whole[numbers], equal_nan=True), name
            mask = rng.random(len(whole)) < 0.5
            assert np.array_equal(value[mask], whole[mask], equal_nan=True), name
            assert np.array_equal(value[1:9:2], whole[1:9:2], equal_nan=True), name
            assert np.array_equal(value[-1], whole[-1], equal_nan=True), name
            assert np.array_equal(value[[]], whole[[]]), name


@pytest.mark.parametrize("case", FAMILIES)
def test_rows_name_their_tokens(stores, case):
    path, documents = stores(case), harness.case_documents(case)
    with actdump.open(path) as store, harness.open_store(path) as file:
        rows = store["everything"].rows()
        for name in ("input_ids", "position", "sequence"):
            assert np.array_equal(rows[name], file[f"everything/rows/{name}"][...])
        table = store.sequences
        assert np.array_equal(table["number"], np.arange(len(documents)))
        assert np.array_equal(rows["document"], table["document"][rows["sequence"]])
        tokens = [documents[d][p] for d, p in zip(rows["document"], rows["position"])]
        assert np.array_equal(rows["input_ids"], tokens)
        part = store["everything"].rows([7, 0, -1])
        assert all(np.array_equal(part[k], rows[k][[7, 0, -1]]) for k in rows)


def test_filters(stores):
    capture = actdump.open(stores("jamba"))["everything"]
    rows = capture.rows()
    token = rows["input_ids"][5]
    assert np.array_equal(capture.select(tokens=token), np.flatnonzero(rows["input_ids"] == token))
    assert np.array_equal(
        capture.select(positions=slice(2, None, 3)),
        np.flatnonzero((rows["position"] >= 2) & (rows["position"] % 3 == 2)),
    )
    assert np.array_equal(
        capture.select(documents=[0, 2], positions=range(4)),
        np.flatnonzero(np.isin(rows["document"], [0, 2]) & (rows["position"] < 4)),
    )
    assert np.array_equal(capture.select(sequences=lambda s: s % 2 == 1), np.flatnonzero(rows["sequence"] % 2))
    assert len(capture.select()) == len(capture)


@pytest.mark.parametrize("case", ["mamba", "laguna"])
def test_moments_are_numpys(stores, case):
    with actdump.open(stores(case)) as store:
        for value in store.values.values():
            if not value.is_float:
                with pytest.raises(actdump.StoreError, match="no statistics"):
                    value.moments()
                continue
            rows = value[:].astype(np.float64)
            rows[np.isneginf(rows)] = np.nan  # the mask of attention scores is not counted
            if np.isnan(rows).all(axis=0).any():
                continue
            got = value.moments()
            np.testing.assert_allclose(got["mean"], np.nanmean(rows, 0), rtol=1e-6, atol=1e-12, err_msg=value.path)
            np.testing.assert_allclose(got["variance"], np.nanvar(rows, 0), rtol=1e-6, atol=1e-12, err_msg=value.path)
            if not np.isnan(rows).any():
                norms = np.linalg.norm(rows.reshape(len(rows), -1), axis=1)
                assert got["mean_norm"] == pytest.approx(norms.mean(), rel=1e-6)
                assert value.statistics["mean_norm"] == pytest.approx(norms.mean(), rel=1e-6)


def test_shown_as_a_table(stores):
    store = actdump.open(stores("jamba"))
    text, page = repr(store), store._repr_html_()
    value = next(iter(store.values.values()))
    for words in (value.path, value.layout, value.dtype, "complete"):
        assert words in text and words in page
    assert page.count("<tr>") == 1 + len(store.values)
    assert "rows" in repr(store["everything"]) and value.description in ("token id", value.description)


def test_bfloat16_reaches_torch_without_conversion(stores):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with actdump.open(stores("mamba-bf16")) as store, harness.open_store(store.path) as file:
        value = next(v for v in store.values.values() if v.dtype == "bfloat16")
        data = file[value.path]
        bits = np.empty(data.shape, np.uint16)
        data.id.read(h5py.h5s.ALL, h5py.h5s.ALL, bits, mtype=data.id.get_type())
        tensor = value.tensor()
        assert tensor.dtype == torch.bfloat16
        assert np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), bits)
        assert np.array_equal(value.read(raw=True), bits)
        assert store["everything/layers/0/layer_output"].tensor([1]).dtype == torch.float32


def test_a_pickled_store_reads_the_same(stores):
    store = actdump.open(stores("mamba"))
    value = store["everything/layers/0/layer_output"]
    before = value[:]
    assert np.array_equal(pickle.loads(pickle.dumps(value))[:], before)


def test_an_incomplete_store_says_so_and_reads(broken):
    whole = actdump.open(broken)
    rows, values = whole["everything"].rows(), whole["everything/layers/1/layer_output"][:]
    probabilities = whole["everything/next_token_probs"][:]

    def lose_the_second_unit(info):
        info["complete"], info["index"], info["statistics"] = False, None, None
        del info["segments"][1]

    edit_manifest(broken, lose_the_second_unit)
    (broken / "segments/000001.h5").unlink()
    (broken / "store.h5").unlink()
    store = actdump.open(broken)
    assert not store.complete and store.missing_units == [1] and "incomplete: 2 of 3 units" in repr(store)
    gone = rows["sequence"] == 2  # units hold sequences 0 and 1, 2, 3
    value = store["everything/layers/1/layer_output"]
    assert np.array_equal(value[:], values[~gone])
    assert np.array_equal(store["everything"].rows()["document"], rows["document"][~gone])
    assert np.array_equal(store["everything/next_token_probs"][:], probabilities[[0, 1, 3]])
    assert np.array_equal(store.sequences["number"], [0, 1, 3])
    np.testing.assert_allclose(value.moments()["mean"], values[~gone].mean(0, dtype=np.float64), rtol=1e-6)
    assert value.statistics is None


def truncate(store):
    path = store / "segments/000001.h5"
    path.write_bytes(path.read_bytes()[:-100])


def swap_segments(store):
    a, b = store / "segments/000000.h5", store / "segments/000002.h5"
    a.write_bytes(b.read_bytes())
    edit_manifest(store, lambda info: info["segments"][0].update(bytes=a.stat().st_size))


def flip_a_byte_of_a_chunk(store):
    path = store / "segments/000000.h5"
    with h5py.File(path) as file:
        chunk = file["everything/layers/1/layer_output"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 0x55
    path.write_bytes(data)


BROKEN = {
    "no store.json": (lambda s: (s / "store.json").unlink(), actdump.StoreError, "store.json: No such file"),
    "cut store.json": (lambda s: (s / "store.json").write_text('{"version": 1'), actdump.StoreError, "not JSON"),
    "another kind": (lambda s: edit_manifest(s, lambda i: i.update(kind="x")), actdump.StoreError, "kind is not"),
    "a newer version": (
        lambda s: edit_manifest(s, lambda i: i.update(version=2)),
        actdump.VersionError,
        "version 2; this package reads version 1",
    ),
    "no segments": (
        lambda s: edit_manifest(s, lambda i: i.pop("segments")),
        actdump.StoreError,
        "segments is not list",
    ),
    "a name outside": (
        lambda s: edit_manifest(s, lambda i: i["segments"][0].update(file="../a.h5")),
        actdump.StoreError,
        "not a file of segments/",
    ),
    "an unknown dtype": (
        lambda s: edit_manifest(s, lambda i: i["datasets"][-1].update(dtype="float8")),
        actdump.StoreError,
        "float8",
    ),
    "a missing segment": (
        lambda s: (s / "segments/000001.h5").unlink(),
        actdump.SegmentError,
        "segments/000001.h5: No such file",
    ),
    "a truncated segment": (truncate, actdump.SegmentError, "bytes, store.json says"),
    "another segment under its name": (swap_segments, actdump.SegmentError, "expected (1, 0)"),
    "a shape that differs": (
        lambda s: edit_manifest(
            s, lambda i: [d.update(shape=[25]) for d in i["datasets"] if d["path"].endswith("1/layer_output")]
        ),
        actdump.SegmentError,
        "expected (14, 25)",
    ),
    "a dtype that differs": (
        lambda s: edit_manifest(
            s, lambda i: [d.update(dtype="bfloat16") for d in i["datasets"] if d["path"].endswith("1/layer_output")]
        ),
        actdump.SegmentError,
        "store.json says 2 bytes",
    ),
    "a flipped byte": (flip_a_byte_of_a_chunk, actdump.SegmentError, "rows 0 to 13"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_one_clear_exception(broken, name):
    harm, kind, words = BROKEN[name]
    harm(broken)
    with pytest.raises(kind) as caught:
        actdump.open(broken)["everything/layers/1/layer_output"][:]
    assert words in str(caught.value) and str(broken) in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__cause__ is None


def test_a_missing_plugin_is_named(stores):
    code = (
        "import sys; sys.modules['hdf5plugin'] = None\nimport actdump\n"
        f"try: actdump.open({str(stores('mamba'))!r})\nexcept actdump.MissingPlugin as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install hdf5plugin" in done.stdout, done.stderr


def test_wrong_indices_are_refused(stores):
    store = actdump.open(stores("mamba"))
    value = store["everything/layers/1/layer_output"]
    for rows in ([len(value)], [-len(value) - 1], [0.5], [[0]], np.ones(3, bool)):
        with pytest.raises(IndexError):
            value[rows]
    with pytest.raises(KeyError, match="it has everything"):
        store["nothing"]
    with pytest.raises(KeyError, match="layer_output"):
        store["everything"].value("layer_outputs", layer=1)
