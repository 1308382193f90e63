"""A disk that is full, a file-size limit, numbers that are not finite: said clearly, nothing lost, gone on with later."""
import json
import resource
import subprocess

import h5py
import numpy as np
import pytest

import harness

LENGTHS = [64] * 600
CAPTURES = {"all": {"values": ["layer_output", "linear_attn/states"], "layers": "all"}}


def make(folder, store, **options):
    corpus = harness.write_corpus(folder / "tokens", harness.random_documents(6, LENGTHS))
    options.setdefault("captures", CAPTURES)
    options.setdefault("checkpoint", harness.FIXTURES / "mamba")
    job, _ = harness.make_job(folder, corpus=corpus, context=64, store=store,
                              store_options={"unit_tokens": 4096, "compression": 0},
                              run={"threads": 1, "batch_tokens": 512, **options.pop("run", {})}, **options)
    return job


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def expect_full(outcome, store):
    assert outcome.status == harness.RESOURCE, outcome.text
    message = outcome.err.splitlines()
    said = [line for line in message if "error:" in line]
    assert len(said) == 1, outcome.err
    assert not harness.looks_whole(store)
    return said[0]


def check_committed(store, reference):
    """What is under a final name is what an undisturbed run writes there."""
    got = harness.segment_bytes(store)
    for name, data in got.items():
        assert data == reference[name], name
    assert not list((store / "segments").glob(".*.tmp"))
    return len(got)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    harness.actdump("run", make(folder, folder / "store")).expect(harness.OK)
    return harness.segment_bytes(folder / "store")


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_full_disk(ranks, small_disk, undisturbed, tmp_path):
    store = small_disk / "store"
    job = make(tmp_path, store)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(30 << 20))
    sentence = expect_full(harness.actdump("run", job, ranks=ranks), store)
    assert "needs" in sentence and "left" in sentence and "MB" in sentence, sentence
    assert 0 < check_committed(store, undisturbed) < len(undisturbed)
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=512m", str(small_disk)], check=True)
    harness.actdump("run", job, ranks=ranks).expect(harness.OK)
    assert check_committed(store, undisturbed) == len(undisturbed)
    harness.actdump("verify", store).expect(harness.OK)


@pytest.mark.parametrize("ranks", [None, 2, 3])
def test_a_disk_that_just_holds_the_store(ranks, small_disk, undisturbed, tmp_path):
    """Units in flight are not counted twice: half a unit more than the store is enough."""
    sizes = [len(data) for data in undisturbed.values()]
    room = (sum(sizes) + max(sizes) // 2) >> 10
    subprocess.run(["mount", "-o", f"remount,size={room}k", str(small_disk)], check=True)
    store = small_disk / "store"
    harness.actdump("run", make(tmp_path, store), ranks=ranks).expect(harness.OK)
    assert check_committed(store, undisturbed) == len(undisturbed)


def test_a_disk_that_fills_up_during_a_unit(small_disk, undisturbed, tmp_path):
    """The check before the unit is content; another's file takes the room while the unit is written."""
    store = small_disk / "store"
    job = make(tmp_path, store)
    store.mkdir()
    (small_disk / "ballast").write_bytes(bytes(52 << 20))  # a unit of 11 MB fits by the first look, two do not
    sentence = expect_full(harness.actdump("run", job), store)
    assert "left" in sentence, sentence
    check_committed(store, undisturbed)


def test_a_file_size_limit(undisturbed, tmp_path):
    store = tmp_path / "store"
    job = make(tmp_path, store)
    limit = 4 << 20
    process = subprocess.run(harness.command("run", job), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                             env=harness.environment(),
                             preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert process.returncode == harness.RESOURCE, process.stderr
    assert "limit" in process.stderr and process.stderr.count("error:") == 1, process.stderr
    assert harness.segments(store) == [] and not harness.looks_whole(store)
    harness.actdump("run", job).expect(harness.OK)
    assert check_committed(store, undisturbed) == len(undisturbed)


def test_a_store_that_cannot_be_written(tmp_path):
    job = make(tmp_path, "/proc/nowhere/store")
    outcome = harness.actdump("run", job)
    assert outcome.status in (harness.USAGE, harness.INPUT, harness.RESOURCE) and "/proc/nowhere" in outcome.err


# ---------------------------------------------------------------- not finite

def poisoned(folder):
    """A checkpoint whose token 5 has an embedding that is not a number."""
    def poison(tensors):
        dtype, table = tensors["backbone.embeddings.weight"]
        table = table.copy()
        table[5, 3] = np.nan
        tensors["backbone.embeddings.weight"] = (dtype, table)
    return harness.copy_checkpoint("mamba", folder, tensors=poison)


def first_five(documents):
    """(document, position) of the first token 5."""
    return next((d, int(np.flatnonzero(ids == 5)[0])) for d, ids in enumerate(documents) if (ids == 5).any())


CAPTURE = {"stream": {"values": ["layer_output"], "layers": [1], "positions": {"every": 1}}}


def test_what_is_not_finite_is_counted_with_its_place(tmp_path):
    job = make(tmp_path, tmp_path / "store", checkpoint=poisoned(tmp_path / "model"), captures=CAPTURE)
    outcome = harness.actdump("run", job).expect(harness.OK)
    document, position = first_five(harness.random_documents(6, LENGTHS))
    with h5py.File(tmp_path / "store/store.h5") as file:
        bad = ~np.isfinite(file["stream/layers/1/layer_output"][...])
    entry = harness.manifest(tmp_path / "store")["statistics"]["stream/layers/1/layer_output"]
    assert entry["n_nonfinite"] == bad.sum() > 0
    assert (entry["first_nonfinite_document"], entry["first_nonfinite_position"]) == (document, position)
    assert f"{bad.sum()} elements are not finite" in outcome.err
    assert f"{document}" in harness.actdump("info", tmp_path / "store").expect(harness.OK).out


@pytest.mark.parametrize("ranks", [None, 2])
def test_on_nonfinite_stop_names_the_place(ranks, tmp_path):
    job = make(tmp_path, tmp_path / "store", checkpoint=poisoned(tmp_path / "model"), captures=CAPTURE,
               run={"on_nonfinite": "stop"})
    outcome = harness.actdump("run", job, ranks=ranks).expect(harness.INPUT)
    document, position = first_five(harness.random_documents(6, LENGTHS))
    assert "stream/layers/1/layer_output" in outcome.err
    if ranks is None:
        assert f"document {document}, position {position} " in outcome.err, outcome.err
    assert not harness.looks_whole(tmp_path / "store")


def test_statistics_are_numpys_whatever_the_ranks_and_interruptions(tmp_path):
    stores = []
    for ranks in (None, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        job = make(folder, folder / "store", captures={"stream": {"values": ["layer_output"], "layers": [1, 2]}})
        if ranks:
            harness.actdump("run", job, "--set", "run.time_limit=2", "--set", "run.grace_seconds=1", ranks=ranks)
        harness.actdump("run", job, ranks=ranks).expect(harness.OK)
        stores.append(folder / "store")
    assert json.dumps(harness.manifest(stores[0])["statistics"]) == json.dumps(harness.manifest(stores[1])["statistics"])
    with h5py.File(stores[1] / "store.h5") as file:
        for layer in (1, 2):
            path = f"stream/layers/{layer}/layer_output"
            data, entry = file[path][...].astype(np.float64), harness.manifest(stores[1])["statistics"][path]
            group = file[f"statistics/{path}"]
            np.testing.assert_allclose(group["mean"][...], data.mean(0), rtol=1e-6, atol=1e-12)
            np.testing.assert_allclose(group["variance"][...], data.var(0), rtol=1e-6)
            assert np.isclose(entry["mean_norm"], np.linalg.norm(data, axis=1).mean(), rtol=1e-6)
            assert np.isclose(entry["mean"], data.mean(), rtol=1e-6)
            assert np.isclose(entry["variance"], data.var(), rtol=1e-6)
            assert entry["max_abs"] == np.abs(data).max()
