"""The whole program on the emulated device: every family from job file to store, and devices that fail under a job."""
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "whole"))
import golden  # noqa: E402
import harness  # noqa: E402

CUDA = {"model_options": {"device": "cuda"}}
BFLOAT16 = [name for name in harness.CASES if (harness.FIXTURES / name / "golden_float32.h5").exists()]
SMALL = {"context": 24, "store_options": {"unit_tokens": 48, "chunk_rows": 5}, "run": {"batch_tokens": 24}}
UNITS = 12  # of small_job
ECC, LAUNCH_FAILURE = 214, 719


def check(store, case, load):
    report = golden.compare_store(store, harness.FIXTURES / case, load)
    assert not report.faults, "\n".join(report.faults)
    assert report.agree == len(report.paths) > 0


def small_job(folder, case="jamba", **options):
    """24 documents in units of two, which are two batches."""
    corpus = harness.write_corpus(folder / "corpus", harness.random_documents(5, [24] * 24))
    values = ["layer_output", "logits", "linear_attn/state"] + ["mlp/router_logits"] * (case == "jamba")
    captures = {"some": {"values": values, "positions": {"every": 3}},
                "half": {"values": ["layer_output"], "dtype": "float16"}}
    return harness.make_job(folder, checkpoint=harness.FIXTURES / case, corpus=corpus, captures=captures,
                            **{**SMALL, **CUDA, **options})


@pytest.mark.parametrize("case", harness.CASES)
def test_every_value_in_the_checkpoints_own_dtype(case, tmp_path):
    check(harness.run_case(tmp_path, case, **CUDA), case, "own")


@pytest.mark.parametrize("case", BFLOAT16)
def test_a_float32_load_of_bfloat16_weights(case, tmp_path):
    check(harness.run_case(tmp_path, case, dtype="float32", **CUDA), case, "float32")


def test_ranks_and_resuming_give_the_same_bytes(tmp_path):
    """Rows come in behind the forward, on a thread of their own: what is stored is the same whoever is faster."""
    folders = [tmp_path / name for name in ("one", "again", "two")]
    for folder in folders:
        folder.mkdir()
    one, again, two = (small_job(folder) for folder in folders)
    harness.actdump("run", one[0]).expect(harness.OK)
    harness.actdump("run", again[0]).expect(harness.OK)
    harness.actdump("run", two[0], ranks=2, env={"EMULATION_DEVICES": "2"}).expect(harness.OK)
    expected = harness.segment_bytes(one[1])
    assert len(expected) == UNITS
    assert harness.segment_bytes(again[1]) == expected
    assert harness.segment_bytes(two[1]) == expected


def test_batches_may_be_many_or_few(tmp_path):
    """The same rows, up to rounding, whether a unit is one batch or more than the landing holds at once."""
    stores = []
    for tokens in (24, 48):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        job, store = small_job(folder, run={"batch_tokens": tokens})
        harness.actdump("run", job).expect(harness.OK)
        stores.append(store)
    with harness.open_store(stores[0]) as a, harness.open_store(stores[1]) as b:
        assert (a["some/rows/position"][...] == b["some/rows/position"][...]).all()
        x, y = a["some/layers/3/layer_output"][...], b["some/layers/3/layer_output"][...]
        assert np.abs(x - y).max() <= 1e-4 * np.abs(y).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float16_overflow_is_counted_as_on_the_host(dtype, tmp_path):
    """Converted and counted on the device; of the same values the host counts the same."""
    def scaled(tensors):
        name = next(n for n in tensors if "embed" in n)
        kind, array = tensors[name]
        array = array * np.float32(1e5)
        array[3, 2], array[4, 1], array[5, 0] = np.inf, -np.inf, np.nan
        tensors[name] = (kind, array)

    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "checkpoint", tensors=scaled)
    captures = {"half": {"values": ["token_embeddings"], "dtype": "float16"}}
    entries = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        job, store = harness.case_job(folder, "mamba", checkpoint=checkpoint, captures=captures, dtype=dtype,
                                      model_options={"device": device})
        outcome = harness.actdump("run", job).expect(harness.OK)
        assert "overflow" in outcome.text
        with harness.open_store(store) as file:
            attributes = file["statistics/half/token_embeddings"].attrs
            entries.append({name: attributes[name] for name in ("n_overflow", "n_nonfinite", "n_rows", "max_abs")})
            entries[-1]["rows"] = file["half/token_embeddings"][...].view("<u2")
    host, device = entries
    assert host["n_overflow"] > 0 and host["n_nonfinite"] > host["n_overflow"]
    nan = (host["rows"] & 0x7fff) > 0x7c00
    assert ((device["rows"] & 0x7fff) > 0x7c00)[nan].all()  # which not-a-number is the device's to choose
    assert (host["rows"][~nan] == device["rows"][~nan]).all()
    assert {k: v for k, v in host.items() if k != "rows"} == {k: v for k, v in device.items() if k != "rows"}


def test_what_is_not_finite_stops_the_job_where_asked(tmp_path):
    def spoiled(tensors):
        name = next(n for n in tensors if "embed" in n)
        kind, array = tensors[name]
        array = array.copy()
        array[7] = np.inf
        tensors[name] = (kind, array)

    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "checkpoint", tensors=spoiled)
    texts = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        job, _ = harness.case_job(folder, "mamba", checkpoint=checkpoint, captures={"c": {"values": ["token_embeddings"]}},
                                  model_options={"device": device}, run={"on_nonfinite": "stop"})
        text = harness.actdump("run", job).expect(harness.INPUT).err
        texts.append(re.search(r"document \d+, position \d+", text).group(0))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("code, said", [(ECC, "ECC"), (LAUNCH_FAILURE, "the device's context is lost")])
def test_a_device_that_fails_loses_the_units_at_hand_alone(code, said, tmp_path):
    job, store = small_job(tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    good = small_job(whole)
    harness.actdump("run", good[0]).expect(harness.OK)
    outcome = harness.actdump("run", job, env={"EMULATION_FAIL_KERNEL": "1200", "EMULATION_FAIL_CODE": str(code)})
    outcome.expect(harness.DEVICE)
    assert said in outcome.err and "emulated GPU 0" in outcome.err
    done = harness.segments(store)
    assert 0 < len(done) < UNITS, len(done)
    harness.actdump("verify", store).expect(harness.OK)
    harness.actdump("run", job).expect(harness.OK)
    assert harness.segment_bytes(store) == harness.segment_bytes(good[1])


def test_memory_that_runs_out_ends_the_job_at_every_allocation(tmp_path):
    """The device has no room for its n-th block, for growing n, until the job succeeds."""
    job, store = small_job(tmp_path, case="bamba")
    n = 0
    while True:
        outcome = harness.actdump("run", job, env={"EMULATION_FAIL_ALLOCATION": str(n)})
        if outcome.status == harness.OK:
            break
        outcome.expect(harness.DEVICE)
        assert "not enough free memory" in outcome.err
        if (Path(store) / "store.json").exists():
            harness.actdump("verify", store).expect(harness.OK)
        n = n * 2 + 1 if n < 40 else n + 7
    assert n > 20


def test_a_job_that_does_not_fit_is_refused_before_weights_are_loaded(tmp_path):
    job, store = small_job(tmp_path)
    memory = {"EMULATION_MEMORY": str(600 << 20)}
    text = harness.actdump("run", job, env=memory).expect(harness.DEVICE).err
    assert "does not fit" in text and re.search(r"make \d\.\d\d GiB, and 0\.\d\d GiB of 0\.59 GiB are free", text)
    assert not list((Path(store) / "segments").glob("*.h5"))
    said = harness.actdump("plan", job, env=memory).expect(harness.OK).out
    assert "it does not fit" in said
    assert "on the GPU: " in said
    assert said.count("it fits") == 1  # the host's memory
    assert harness.actdump("plan", job).expect(harness.OK).out.count("it fits") == 2


def test_auto_batches_are_as_large_as_the_device_takes(tmp_path):
    corpus = harness.write_corpus(tmp_path / "corpus", harness.random_documents(5, [256] * 80))
    job, _ = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, context=256,
                              captures={"c": {"values": ["logits"]}}, run={"batch_tokens": "auto"}, **CUDA)
    planned = []
    for mebibytes in (8192, 815, 800, 400):
        said = harness.actdump("plan", job, env={"EMULATION_MEMORY": str(mebibytes << 20)}).expect(harness.OK).out
        planned.append(int(re.search(r"batches of (\d+) tokens", said).group(1)))
    assert planned == [16384, 8192, 4096, 2048]


def test_a_store_goes_on_with_the_batches_it_was_begun_with(tmp_path):
    job, store = small_job(tmp_path, case="mamba", run={})
    harness.actdump("run", job, "--set", "run.batch_tokens=24").expect(harness.OK)
    whole = harness.segment_bytes(store)
    harness.segments(store)[3].unlink()
    harness.actdump("run", job).expect(harness.OK)
    assert harness.manifest(store)["run"]["batch_tokens"] == 24
    assert harness.segment_bytes(store) == whole


def test_more_ranks_than_devices_is_an_error_with_both_numbers(tmp_path):
    job, _ = small_job(tmp_path, case="mamba")
    text = harness.actdump("run", job, ranks=2).expect(harness.DEVICE).err
    assert "2 ranks and 1 GPU" in text
