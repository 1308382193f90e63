"""What a stranger does with a store: h5py and hdf5plugin, nothing of ours."""
import json
import shutil

import h5py
import jsonschema
import numpy as np
import pytest

import harness

STATES = "everything/layers/1/linear_attn/states"


@pytest.fixture
def store(mamba_store, tmp_path):
    """A copy to break, of three segments."""
    return shutil.copytree(mamba_store, tmp_path / "store")


def test_the_fixture_has_several_segments(mamba_store):
    assert len(harness.segments(mamba_store)) == 3  # sequences of 13 and 1, 21, 3 tokens in units of 16


def test_a_moved_store_opens(store, tmp_path):
    before = harness.read_values(store)
    moved = tmp_path / "elsewhere" / "under another name"
    moved.parent.mkdir()
    store.rename(moved)
    after = harness.read_values(moved)
    assert all(np.array_equal(before[path], after[path], equal_nan=True) for path in before)
    harness.actdump("verify", moved).expect(harness.OK)


def test_a_missing_segment_reads_as_nan_and_verify_names_it(store):
    before = harness.read_values(store)
    gone = before["rows/sequence"] == 2
    (store / "segments/000001.h5").unlink()
    for path, values in harness.read_values(store).items():
        if len(values) == len(gone):
            lost, kept = values[gone], values[~gone]
            assert np.array_equal(kept, before[path][~gone], equal_nan=True), path
        else:  # a value that a sequence has once
            lost = values[2]
        assert np.isnan(lost).all() if np.issubdtype(values.dtype, np.floating) else (lost == -1).all(), path
    outcome = harness.actdump("verify", store).expect(harness.INPUT)
    assert "segments/000001.h5" in outcome.text


def test_segments_hold_their_own_rows(mamba_store):
    whole = harness.read_values(mamba_store)
    for path in ("layers/1/linear_attn/states", "rows/position", "logits", "next_token_probs"):
        parts = []
        for segment in harness.segments(mamba_store):
            with h5py.File(segment) as file:
                parts.append(file["everything"][path][...])
        assert np.array_equal(np.concatenate(parts), whole[path])


def test_layout_attributes_and_labels(mamba_store):
    with harness.open_store(mamba_store) as index, h5py.File(harness.segments(mamba_store)[0]) as segment:
        for file in (index, segment):
            states = file[STATES]
            wanted = {"layout": "row channels state_dim", "value": "states", "host": "linear_attn", "layer": 1,
                      "load_dtype": "float32"}
            assert {k: states.attrs[k] for k in wanted} == wanted
            assert len(states.attrs["description"]) > 10
            assert [d.label for d in states.dims] == ["row", "channels", "state_dim"]
            assert file["everything/next_token_probs"].attrs["layout"] == "sequence vocab_size"
            assert file["everything/input_ids"].attrs["layout"] == "row"
            assert file["everything/logits"].attrs["layout"] == "row vocab_size"


def test_chunks_are_shuffled_and_compressed(mamba_store):
    with h5py.File(harness.segments(mamba_store)[0]) as file:
        filters = file[STATES].id.get_create_plist()
        assert [filters.get_filter(i)[0] for i in range(filters.get_nfilters())] == [2, 32015]


def test_chunk_rows_and_no_compression(tmp_path):
    store = harness.run_case(tmp_path, "mamba", captures={"c": {"values": ["layer_output"], "layers": [0]}},
                             store_options={"chunk_rows": 8, "compression": 0})
    with h5py.File(harness.segments(store)[0]) as file:
        data = file["c/layers/0/layer_output"]
        assert data.chunks == (8, 24) and data.id.get_create_plist().get_nfilters() == 0
        assert data.id.get_num_chunks() == 5  # 38 rows
    harness.actdump("verify", store).expect(harness.OK)


def test_bfloat16_reads_as_float32_and_as_raw_bits(tmp_path):
    store = harness.run_case(tmp_path, "mamba-bf16")
    path = "everything/layers/1/linear_attn/attention_output"
    with harness.open_store(store) as file:
        data = file[path]
        assert data.attrs["load_dtype"] == "bfloat16"
        bits = np.empty(data.shape, np.uint16)
        data.id.read(h5py.h5s.ALL, h5py.h5s.ALL, bits, mtype=data.id.get_type())
        values = data[...]
        assert values.dtype == np.float32
        # What stays in float32 under a bfloat16 load is stored so.
        assert file["everything/layers/1/layer_output"].dtype.itemsize == 4
    assert np.array_equal((bits.astype(np.uint32) << 16).view(np.float32), values)
    assert len(np.unique(values)) > 100


def test_statistics_are_numpys(mamba_store):
    with harness.open_store(mamba_store) as file:
        for path in harness.value_paths(file["everything"]):
            data = file["everything"][path][...]
            name = f"statistics/everything/{path}"
            if not np.issubdtype(data.dtype, np.floating):
                assert name not in file, path
                continue
            got = file[name]
            rows = data.reshape(len(data), -1).astype(np.float64)
            np.testing.assert_allclose(got["mean"][...].ravel(), rows.mean(0), rtol=1e-6, atol=1e-12, err_msg=path)
            np.testing.assert_allclose(got["variance"][...].ravel(), rows.var(0), rtol=1e-6, atol=1e-12, err_msg=path)
            assert got.attrs["n_rows"] == len(rows)
            assert got.attrs["n_nonfinite"] == 0
            assert got.attrs["mean_norm"] == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-6)
            assert got.attrs["max_abs"] == pytest.approx(np.abs(rows).max(), rel=1e-6)


def test_store_json_follows_its_schema(mamba_store):
    schema = json.loads((harness.ROOT / "schemas/store.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(harness.manifest(mamba_store), schema)


def test_the_configs_follow_the_job_schema_and_their_layers_exist():
    schema = json.loads((harness.ROOT / "schemas/job.schema.json").read_text())
    files = sorted((harness.ROOT / "configs").glob("*.json"))
    assert len(files) >= 5
    for file in files:
        jsonschema.validate(json.loads(file.read_text()), schema)


@pytest.mark.parametrize("name", ["sample-mamba", "sample-jamba"])
def test_the_sample_jobs_run(name, tmp_path):
    """On the first few chapters: the whole of it is `make demo`."""
    store = tmp_path / "store"
    harness.actdump("run", harness.ROOT / f"configs/{name}.json", "--set", f"store.path={store}",
                    "--set", "corpus.limit=3").expect(harness.OK)
    with harness.open_store(store) as file:
        assert file["residuals/layers/3/layer_output"].shape[1] == 128
        assert file["residuals/rows/input_ids"][0] == 0  # every chapter begins with <|endoftext|>
    harness.actdump("verify", store).expect(harness.OK)
