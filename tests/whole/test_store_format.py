"""The store's format, read back by h5py and hdf5plugin and rebuilt by hand from schemas/store.md alone: a made-up store that
tests/tools/make_store.c writes, every element of which follows from a formula."""
import json
import os
import shutil
import subprocess

import h5py
import hdf5plugin
import jsonschema
import numpy as np
import pytest
import xxhash

import harness

UNITS = 7
SEQUENCES = [9, 1, 0, 4, 16, 9, 1]  # of each unit
TINY = np.float32(16777216)


def mix(dataset, rows, columns):
    """made_up_mix of tests/tools/made_up.h."""
    u = np.uint64
    with np.errstate(over="ignore"):
        z = (u(dataset + 1) * u(0x9E3779B97F4A7C15) + np.arange(rows, dtype=u)[:, None] * u(0xBF58476D1CE4E5B9)
             + np.arange(columns, dtype=u)[None] * u(0x94D049BB133111EB))
        z ^= z >> u(31)
        z *= u(0xD6E8FEB86659FD93)
        z ^= z >> u(32)
    return (z >> u(40)).astype(np.uint32)


def to_bfloat16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def wanted(dataset, described, rows):
    """All rows of a value as [rows, columns], in what the stored dtype reads as."""
    columns = int(np.prod(described["shape"], dtype=np.int64))
    mixed = mix(dataset, rows, columns)
    if described["dtype"] == "int32":
        return (mixed % 1000).astype(np.int32)
    x = mixed.astype(np.float32) / TINY * np.float32(4) - np.float32(2)
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    if described["value"] == "attention_scores":
        x[(column % 7) > (row % 7)] = -np.inf
    if described["dtype"] == "float16":
        chosen = (row % 11 == 5) & (column == 3)
        x = np.where(chosen, np.where(x < 0, np.float32(-1e6), np.float32(1e6)), x)
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    if described["path"] == "some/layers/0/layer_output":
        chosen = (row >= 7) & (column == row % 5)
        x = np.where(chosen, np.where(row % 2 == 0, np.float32(np.nan), np.float32(np.inf)), x)
    return from_bfloat16(to_bfloat16(x)) if described["dtype"] == "bfloat16" else x


@pytest.fixture(scope="module")
def make_store():
    program = os.path.join(os.path.dirname(harness.ACTDUMP), "..", "tests", "tools", "make_store")
    if not os.path.exists(program):
        program = os.environ.get("MAKE_STORE", program)

    def make(folder, threads=2, units=UNITS, level=1):
        subprocess.run([program, str(folder), str(threads), str(units), str(level), "nonfinite"], check=True)
        return folder
    return make


@pytest.fixture(scope="module", params=[1, 0, 9], ids=lambda level: f"level{level}")
def store(request, make_store, tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("made-up") / "store", level=request.param)


@pytest.fixture(scope="module")
def manifest(store):
    return json.loads((store / "store.json").read_text())


def values(manifest):
    return [(i, d) for i, d in enumerate(manifest["datasets"]) if d["load_dtype"] is not None]


def test_store_json_follows_its_schema(manifest):
    schema = json.loads((harness.ROOT / "schemas/store.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(manifest, schema)
    assert next(iter(manifest)) == "version"


def test_every_element_through_store_h5(store, manifest):
    with h5py.File(store / "store.h5") as file:
        for index, d in values(manifest):
            data = file[d["path"]]
            exact = wanted(index, d, len(data)).reshape(data.shape)
            assert list(data.shape[1:]) == d["shape"]
            assert np.array_equal(data[...], exact, equal_nan=exact.dtype.kind == "f"), d["path"]


def test_tables(store, manifest):
    with h5py.File(store / "store.h5") as file:
        n = sum(SEQUENCES)
        lengths = np.arange(n) * 7 % 13 + 1
        assert np.array_equal(file["sequences/document"][...], np.arange(n) // 2)
        assert np.array_equal(file["sequences/start"][...], np.arange(n) % 2 * 100)
        assert np.array_equal(file["sequences/length"][...], lengths)
        assert not file["sequences/continues"][...].any()
        for capture, step in (("all", 1), ("some", 3)):
            rows = [(s, p) for s in range(n) for p in range(0, lengths[s], step)]
            sequence, position = np.array(rows).T
            assert np.array_equal(file[f"{capture}/rows/sequence"][...], sequence)
            assert np.array_equal(file[f"{capture}/rows/position"][...], position)
            assert np.array_equal(file[f"{capture}/rows/input_ids"][...], (sequence * 31 + position) % 50000)
        assert file["none/rows/sequence"].shape == (0,)
    assert manifest["unit_start"] == np.concatenate([[0], np.cumsum(SEQUENCES)]).tolist()
    assert [s["n_sequences"] for s in manifest["segments"]] == SEQUENCES
    assert manifest["totals"]["n_tokens"] == int(lengths.sum()) == sum(s["n_tokens"] for s in manifest["segments"])


def test_attributes(store, manifest):
    for name in ("store.h5", "segments/000002.h5", "segments/000004.h5"):
        with h5py.File(store / name) as file:
            for d in manifest["datasets"]:
                data = file[d["path"]]
                for key in ("layout", "value", "layer", "host", "dtype"):
                    assert data.attrs[key] == d[key], (d["path"], key)
                assert data.attrs["load_dtype"] == (d["load_dtype"] or "")
                assert data.attrs["description"]
                assert [axis.label for axis in data.dims] == d["layout"].split()
                assert list(data.shape[1:]) == d["shape"]


def unpack(data, level):
    """A dataset's rows from its raw chunks, by what store.md says and nothing else."""
    rows = []
    itemsize, width = data.dtype.itemsize if data.dtype != np.float32 else data.id.get_type().get_size(), data.shape[1:]
    elements = data.chunks[0] * int(np.prod(width, dtype=np.int64))
    for first in range(0, data.shape[0], data.chunks[0]):
        mask, raw = data.id.read_direct_chunk((first, *[0] * len(width)))
        assert mask == 0
        if level:
            assert raw[:4] == b"\x28\xb5\x2f\xfd" and raw[4] & 4  # zstd's magic number; a checksum is there
            with h5py.File.in_memory() as scratch:  # unpacked by hdf5plugin's zstd alone
                one = scratch.create_dataset("x", elements * itemsize, np.uint8, chunks=(elements * itemsize,),
                                             compression=hdf5plugin.Zstd())
                one.id.write_direct_chunk((0,), raw)
                raw = one[...].tobytes()
            raw = np.frombuffer(raw, np.uint8).reshape(itemsize, elements).T.tobytes()  # the shuffle undone
        assert len(raw) == elements * itemsize
        chunk = np.frombuffer(raw, np.uint8).reshape(data.chunks[0], -1)
        n = min(data.chunks[0], data.shape[0] - first)
        assert not chunk[n:].any()
        rows.append(chunk[:n])
    return np.concatenate(rows) if rows else np.zeros((0, 1), np.uint8)


def test_raw_chunks(store, manifest):
    seen = {d["path"]: 0 for _, d in values(manifest)}
    kinds = {"float32": np.float32, "float16": np.float16, "int32": np.int32, "bfloat16": np.uint16}
    whole = {d["path"]: wanted(i, d, 400) for i, d in values(manifest)}
    for segment in manifest["segments"]:
        with h5py.File(store / segment["file"]) as file:
            for _, d in values(manifest):
                data, at = file[d["path"]], seen[d["path"]]
                wide = segment["n_sequences"] if d["layout"].startswith("sequence") else segment["rows"][d["capture"]]
                assert data.shape[0] == wide
                assert data.chunks == (max(1, min(d["chunk_rows"], wide)), *d["shape"])
                found = unpack(data, manifest["compression"]["level"])
                exact = whole[d["path"]][at:at + wide]
                if d["dtype"] == "bfloat16":
                    exact = (exact.view(np.uint32) >> 16).astype(np.uint16)
                found = np.ascontiguousarray(found).view(kinds[d["dtype"]]).reshape(exact.shape) if wide else exact
                assert np.array_equal(found, exact, equal_nan=exact.dtype.kind == "f"), d["path"]
                seen[d["path"]] += wide


def test_filters(store, manifest):
    with h5py.File(store / "segments/000000.h5") as file:
        for d in manifest["datasets"]:
            plist = file[d["path"]].id.get_create_plist()
            assert [plist.get_filter(i)[0] for i in range(plist.get_nfilters())] == manifest["compression"]["filters"]


def test_bfloat16_raw_bits(store, manifest):
    with h5py.File(store / "store.h5") as file:
        data = file["all/layers/1/layer_output"]
        bits = np.empty(data.shape, np.uint16)
        data.id.read(h5py.h5s.ALL, h5py.h5s.ALL, bits, mtype=data.id.get_type())
        assert data.dtype == np.float32
        assert np.array_equal(from_bfloat16(bits), data[...])


def close(found, exact, scale=0.0):
    return np.all(np.abs(np.asarray(found) - exact) <= 1e-12 * (np.abs(exact) + scale))


def numbers_of(d, x):
    """Statistics of [rows, columns] by numpy: counts, means, variances by column; scalars."""
    x = x.reshape(len(x), int(np.prod(d["shape"], dtype=np.int64))).astype(np.float64)
    masked = np.isneginf(x) if d["value"] == "attention_scores" else np.zeros(x.shape, bool)
    good, bad = np.isfinite(x), ~np.isfinite(x) & ~masked
    clean = np.where(good, x, 0.0)
    count = good.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, clean.sum(0) / count, 0.0)
        variance = (np.where(good, x - mean, 0.0) ** 2).sum(0) / count
    whole = ~bad.any(1)
    norms = np.sqrt((clean[whole] ** 2).sum(1))
    return {"count": count, "mean": mean, "variance": variance, "n_nonfinite": int(bad.sum()),
            "n_norms": int(whole.sum()), "mean_norm": norms.mean() if whole.any() else 0.0,
            "max_abs": np.abs(clean).max(initial=0.0), "all": clean[good],
            "first": int(np.argmax(bad.any(1))) if bad.any() else -1}


def test_statistics_are_numpys(store, manifest):
    with h5py.File(store / "store.h5") as file:
        for _, d in values(manifest):
            name = f"statistics/{d['path']}"
            if d["dtype"] == "int32":
                assert name not in file and d["path"] not in manifest["statistics"]
                continue
            got, exact = file[name], numbers_of(d, file[d["path"]][...])
            scalars = manifest["statistics"][d["path"]]
            spread = np.sqrt(np.nanmax(exact["variance"], initial=0.0))
            filled = exact["count"] > 0
            assert np.array_equal(got["count"][...], exact["count"])
            assert close(got["mean"][...], exact["mean"], spread), d["path"]
            assert close(got["variance"][...][filled], exact["variance"][filled]), d["path"]
            assert np.isnan(got["variance"][...][~filled]).all()
            assert got.attrs["n_rows"] == scalars["n_rows"] == len(file[d["path"]])
            assert got.attrs["n_nonfinite"] == scalars["n_nonfinite"] == exact["n_nonfinite"]
            assert got.attrs["n_norms"] == exact["n_norms"]
            assert got.attrs["max_abs"] == scalars["max_abs"] == exact["max_abs"]
            assert got.attrs["first_nonfinite_row"] == exact["first"]
            if len(exact["all"]):
                assert close(scalars["mean"], exact["all"].mean(), spread)
                assert close(scalars["variance"], exact["all"].var())
                assert close(got.attrs["mean"], exact["all"].mean(), spread)
            if exact["n_norms"]:
                assert close(scalars["mean_norm"], exact["mean_norm"])
                assert close(got.attrs["mean_norm"], exact["mean_norm"])


def test_first_place_of_what_is_not_finite(store, manifest):
    with h5py.File(store / "store.h5") as file:
        for path in ("some/layers/0/layer_output", "all/layers/1/linear_attn/attention_output"):
            found, capture = manifest["statistics"][path], path.split("/")[0]
            row = found["first_nonfinite_row"]
            assert found["n_nonfinite"] > 0
            assert found["first_nonfinite_sequence"] == file[f"{capture}/rows/sequence"][row]
            assert found["first_nonfinite_position"] == file[f"{capture}/rows/position"][row]
            assert found["first_nonfinite_document"] == file["sequences/document"][found["first_nonfinite_sequence"]]
        assert found["n_overflow"] == found["n_nonfinite"]  # of the float16 dataset: all overflowed
        assert manifest["statistics"]["some/layers/0/layer_output"]["n_overflow"] == 0


def test_segments_carry_their_own_statistics(store, manifest):
    segment = manifest["segments"][4]
    with h5py.File(store / segment["file"]) as file:
        assert file.attrs["unit"] == 4 and file.attrs["first_sequence"] == segment["first_sequence"]
        assert file.attrs["n_tokens"] == segment["n_tokens"] and file.attrs["store_version"] == 1
        for path in ("all/layers/0/layer_output", "all/next_token_probs", "some/layers/0/layer_input"):
            d = next(d for _, d in values(manifest) if d["path"] == path)
            got, exact = file[f"statistics/{path}"], numbers_of(d, file[path][...])
            assert close(got["m2"][...], exact["variance"] * exact["count"])
            assert got.attrs["n_rows"] == len(file[path])


def test_checksums_and_sizes(store, manifest):
    for segment in manifest["segments"]:
        data = (store / segment["file"]).read_bytes()
        assert segment["bytes"] == len(data)
        assert segment["checksum"] == xxhash.xxh3_64_hexdigest(data)
    assert manifest["totals"]["bytes"] == sum(s["bytes"] for s in manifest["segments"])
    rows = {c: sum(s["rows"][c] for s in manifest["segments"]) for c in manifest["captures"]}
    n = manifest["totals"]["n_sequences"]
    assert manifest["totals"]["raw_bytes"] == sum(
        d["row_bytes"] * (n if d["layout"].startswith("sequence") else rows[d["capture"]])
        for d in manifest["datasets"])


def test_bytes_do_not_depend_on_threads(make_store, tmp_path):
    stores = [make_store(tmp_path / f"{n}", threads=n, units=5) for n in (1, 2, 4)]
    for path in sorted(p.relative_to(stores[0]) for p in stores[0].rglob("*") if p.is_file()):
        for other in stores[1:]:
            assert (stores[0] / path).read_bytes() == (other / path).read_bytes(), path


def test_a_moved_store_and_a_missing_segment(store, manifest, tmp_path):
    moved = shutil.copytree(store, tmp_path / "another name" / "store")
    gone = manifest["segments"][3]
    (moved / gone["file"]).unlink()
    first = sum(s["rows"]["all"] for s in manifest["segments"][:3])
    last = first + gone["rows"]["all"]
    with h5py.File(store / "store.h5") as whole, h5py.File(moved / "store.h5") as file:
        for path in ("all/layers/0/layer_output", "all/layers/1/layer_output", "all/layers/1/linear_attn/attention_output",
                     "all/layers/2/mlp/expert_indices", "all/rows/sequence"):
            before, after = whole[path][...], file[path][...]
            lost = after[first:last]
            assert np.isnan(lost).all() if lost.dtype.kind == "f" else (lost == -1).all(), path
            assert np.array_equal(np.delete(before, np.s_[first:last], 0), np.delete(after, np.s_[first:last], 0),
                                  equal_nan=before.dtype.kind == "f"), path
