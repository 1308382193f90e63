"""`verify` finds every fault, names it, and goes on to the next."""
import json
import shutil

import h5py
import pytest
import xxhash

import harness

DATASETS = ["everything/layers/1/layer_output", "everything/layers/2/linear_attn/states", "everything/logits",
            "everything/next_token_probs", "everything/rows/input_ids", "sequences/length"]


@pytest.fixture
def store(mamba_store, tmp_path):
    return shutil.copytree(mamba_store, tmp_path / "store")


@pytest.fixture(scope="module")
def long_store(tmp_path_factory):
    """Six segments."""
    folder = tmp_path_factory.mktemp("long")
    corpus = harness.write_corpus(folder / "tokens", harness.random_documents(4, [20] * 12))
    job, store = harness.make_job(folder, checkpoint=harness.FIXTURES / "mamba", corpus=corpus,
                                  store_options={"unit_tokens": 40, "chunk_rows": 16},
                                  captures={"c": {"values": ["layer_output"], "layers": "all"}})
    harness.actdump("run", job).expect(harness.OK)
    assert len(harness.segments(store)) == 6
    return store


def segment(store, number):
    return store / f"segments/{number:06}.h5"


def faults(store):
    """What verify says of a store that must not pass."""
    return harness.actdump("verify", store).expect(harness.INPUT).text


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def chunks(path, dataset):
    """[(offset in the file, bytes)] of a dataset's chunks."""
    with h5py.File(path) as file:
        held = file[dataset].id
        infos = [held.get_chunk_info(i) for i in range(held.get_num_chunks())]
    return [(info.byte_offset, info.size) for info in infos]


def edit_manifest(store, edit):
    held = harness.manifest(store)
    edit(held)
    (store / "store.json").write_text(json.dumps(held))


def restate_checksum(store, number):
    """Makes store.json's checksum of a segment that of the file as it now is, so that only its contents can tell."""
    old = segment(store, number).read_bytes()

    def edit(held):
        record = held["segments"][number]
        assert "checksum" in record
        record["checksum"] = xxhash.xxh3_64_hexdigest(old)
        record["bytes"] = len(old)
    edit_manifest(store, edit)


def test_a_whole_store_passes(mamba_store, long_store):
    for whole in (mamba_store, long_store):
        harness.actdump("verify", whole).expect(harness.OK)


def test_checksums_are_those_of_the_files(mamba_store):
    for record, path in zip(harness.manifest(mamba_store)["segments"], harness.segments(mamba_store), strict=True):
        assert record["checksum"] == xxhash.xxh3_64_hexdigest(path.read_bytes())


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_flipped_byte_in_any_chunk(dataset, store):
    for offset, size in chunks(segment(store, 1), dataset):
        path = segment(store, 1)
        for at in (offset, offset + size // 2, offset + size - 1):
            flip(path, at)
            assert "segments/000001.h5" in faults(store)
            flip(path, at)
    harness.actdump("verify", store).expect(harness.OK)


@pytest.mark.parametrize("dataset", DATASETS[:3])
def test_a_flipped_byte_under_a_right_checksum(dataset, store):
    """Whoever rewrote store.json too is found out by the chunk's own checksum, and the dataset is named."""
    (offset, size), *_ = chunks(segment(store, 1), dataset)
    flip(segment(store, 1), offset + size // 2)
    restate_checksum(store, 1)
    text = faults(store)
    assert "segments/000001.h5" in text and dataset in text


@pytest.mark.parametrize("keep", [0, 1, 512, -1])
def test_a_truncated_segment(keep, store):
    path = segment(store, 2)
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    text = faults(store)
    assert "segments/000002.h5" in text and str(len(data)) in text


def test_a_missing_segment(store):
    segment(store, 0).unlink()
    assert "segments/000000.h5" in faults(store)


def test_segments_that_changed_places(store):
    a, b = segment(store, 0), segment(store, 2)
    held = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(held)
    text = faults(store)
    assert "segments/000000.h5" in text and "segments/000002.h5" in text


def test_rows_of_another_sequence(store):
    """The row table, rewritten by hand with a right checksum."""
    path = segment(store, 1)
    with h5py.File(path, "r+") as file:
        rows = file["everything/rows/sequence"]
        held = rows[...]
        held[3] = 0
        rows[...] = held
    restate_checksum(store, 1)
    assert "rows/sequence" in faults(store)


@pytest.mark.parametrize("edit", [
    lambda file: file["everything/layers/1/layer_output"].attrs.__setitem__("layout", "row nothing"),
    lambda file: file["everything/layers/1/layer_output"].attrs.__setitem__("layer", 7),
    lambda file: file.__delitem__("everything/layers/1/layer_output"),
    lambda file: file["everything/layers/1/layer_output"].resize(20, 0),
])
def test_a_dataset_that_is_not_what_store_json_says(edit, store):
    with h5py.File(segment(store, 1), "r+") as file:
        edit(file)
    restate_checksum(store, 1)
    text = faults(store)
    assert "segments/000001.h5" in text and "layers/1/layer_output" in text


def numbers(record, path=()):
    """The places of all whole numbers in a JSON value."""
    if isinstance(record, dict):
        for key, item in record.items():
            yield from numbers(item, (*path, key))
    elif isinstance(record, list):
        for i, item in enumerate(record):
            yield from numbers(item, (*path, i))
    elif isinstance(record, int) and not isinstance(record, bool):
        yield path


def raise_number(record, path):
    for key in path[:-1]:
        record = record[key]
    record[path[-1]] += 1


def test_every_number_of_a_segments_record(store):
    places = list(numbers(harness.manifest(store)["segments"][1]))
    assert len(places) >= 4
    for place in places:
        before = (store / "store.json").read_bytes()
        edit_manifest(store, lambda held: raise_number(held["segments"][1], place))
        outcome = harness.actdump("verify", store)
        assert outcome.status == harness.INPUT, f"segments[1]{place} raised by one: {outcome.text}"
        (store / "store.json").write_bytes(before)


MANIFESTS = {
    "a checksum": lambda m: m["segments"][1].update(checksum="0" * 16),
    "a segment less": lambda m: m["segments"].pop(),
    "a segment twice": lambda m: m["segments"].append(m["segments"][0]),
    "a newer version": lambda m: m.update(version=m["version"] + 1),
    "no segments": lambda m: m.pop("segments"),
    "no version": lambda m: m.pop("version"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_store_json_that_disagrees(name, store):
    edit_manifest(store, MANIFESTS[name])
    faults(store)


def test_a_store_json_that_cannot_be_read(store):
    for data in (b"", b"{", b"[]", (store / "store.json").read_bytes()[:300]):
        (store / "store.json").write_bytes(data)
        assert "store.json" in faults(store)
    (store / "store.json").unlink()
    assert "store.json" in faults(store)


def test_store_h5_missing_broken_or_of_another_store(store, tmp_path):
    index = store / "store.h5"
    held = index.read_bytes()
    index.unlink()
    assert "store.h5" in faults(store)
    index.write_bytes(held[:700])
    assert "store.h5" in faults(store)
    other = harness.run_case(tmp_path, "mamba", store="other", captures={"everything": {"values": ["logits"]}})
    shutil.copy(other / "store.h5", index)
    assert "store.h5" in faults(store)
    harness.actdump("index", store).expect(harness.OK)
    harness.actdump("verify", store).expect(harness.OK)


def test_all_faults_at_once(long_store, tmp_path):
    """Two segments deleted, one cut short, a byte flipped in a fourth, and store.json edited: all five are named."""
    store = shutil.copytree(long_store, tmp_path / "store")
    segment(store, 0).unlink()
    segment(store, 3).unlink()
    path = segment(store, 1)
    path.write_bytes(path.read_bytes()[:-1])
    offset, size = chunks(segment(store, 4), "c/layers/2/layer_output")[1]
    flip(segment(store, 4), offset + size // 2)
    place = next(p for p in numbers(harness.manifest(store)["segments"][5]) if "row" in str(p))
    edit_manifest(store, lambda held: raise_number(held["segments"][5], place))
    text = faults(store)
    for number in (0, 1, 3, 4, 5):
        assert f"segments/{number:06}.h5" in text, text
    assert "segments/000002.h5" not in text, text
