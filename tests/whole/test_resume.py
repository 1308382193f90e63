"""Going on: what is taken over, what is refused, what is done anew."""
import json
import shutil

import pytest

import harness
import jobs

LENGTHS = [30, 64, 7, 64, 50, 1, 64, 64, 20, 64]
CAPTURES = {"stream": {"values": ["layer_output"], "layers": "all"}}


def make(folder, lengths=LENGTHS, case="mamba", **options):
    folder.mkdir(exist_ok=True)
    corpus = harness.write_corpus(folder / "tokens", harness.random_documents(4, lengths))
    options.setdefault("captures", CAPTURES)
    options.setdefault("checkpoint", harness.FIXTURES / case)
    return harness.make_job(folder, corpus=corpus, context=64, store_options={"unit_tokens": 128},
                            run={"threads": 1, "batch_tokens": 64}, **options)


def test_a_finished_job_does_nothing_and_says_so(tmp_path):
    job, store = make(tmp_path)
    harness.actdump("run", job).expect(harness.OK)
    before = {p: p.stat().st_mtime_ns for p in store.rglob("*") if p.name != "store.lock"}
    outcome = harness.actdump("run", job).expect(harness.OK)
    assert "nothing to do" in outcome.err
    assert {p: p.stat().st_mtime_ns for p in store.rglob("*") if p.name != "store.lock"} == before


@pytest.mark.parametrize("damage", ["truncated", "removed", "grown"])
def test_a_damaged_segment_is_done_anew(damage, tmp_path):
    job, store = make(tmp_path)
    harness.actdump("run", job).expect(harness.OK)
    reference = harness.segment_bytes(store)
    segment = harness.segments(store)[1]
    if damage == "removed":
        segment.unlink()
    else:
        segment.write_bytes(segment.read_bytes()[:-1] if damage == "truncated" else segment.read_bytes() + b"x")
    (store / "segments/.000003.h5.elsewhere.1.tmp").write_bytes(b"left behind")
    harness.actdump("run", job, ranks=2).expect(harness.OK)
    assert harness.segment_bytes(store) == reference
    assert not list((store / "segments").glob(".*"))
    harness.actdump("verify", store).expect(harness.OK)


def test_segments_that_store_json_does_not_know_yet_are_taken_over(tmp_path):
    job, store = make(tmp_path)
    harness.actdump("run", job).expect(harness.OK)
    reference = harness.segment_bytes(store)
    whole = harness.manifest(store)
    known = dict(whole, complete=False, segments=whole["segments"][:1])
    known["statistics"] = None
    (store / "store.json").write_text(json.dumps(known))
    stamps = {p: p.stat().st_mtime_ns for p in harness.segments(store)}
    harness.actdump("run", job).expect(harness.OK)
    assert harness.segment_bytes(store) == reference
    assert {p: p.stat().st_mtime_ns for p in harness.segments(store)} == stamps
    assert harness.manifest(store)["segments"] == whole["segments"]


def test_a_corpus_that_grew_at_its_end_goes_on(tmp_path):
    short, long = tmp_path / "short", tmp_path / "long"
    grown = LENGTHS + [40, 9, 64, 64, 13]
    job, store = make(short)
    harness.actdump("run", job).expect(harness.OK)
    first = harness.segment_bytes(store)
    kept = {p: p.stat().st_mtime_ns for p in harness.segments(store)[:-1]}
    make(short, grown)  # the first documents are the same: one generator draws them in order
    outcome = harness.actdump("run", job).expect(harness.OK)
    assert "done anew" in outcome.err
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    twin, reference = make(long, grown)
    harness.actdump("run", twin).expect(harness.OK)
    assert harness.segment_bytes(store) == harness.segment_bytes(reference)
    assert len(harness.segments(store)) > len(first)
    harness.actdump("verify", store).expect(harness.OK)


def contents(store):
    """Every file but the lock, whose text only says who came last."""
    return {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != "store.lock"}


CHANGES = {
    "layers": (["captures.stream.layers=[0]"], "captures.stream"),
    "a capture more": (['captures.more={"values":["logits"]}'], "captures.more"),
    "positions": (['captures.stream.positions="last"'], "captures.stream"),
    "dtype": (["model.dtype=bfloat16"], "model.load_dtype"),
    "context": (["corpus.context=32"], "corpus.context"),
    "start": (["corpus.start=1"], "corpus.start"),
    "prepend": (["corpus.prepend=[1]"], "corpus.prepend"),
    "shuffle": (["corpus.shuffle_seed=3"], "corpus.shuffle_seed"),
    "batch_tokens": (["run.batch_tokens=32"], "run.batch_tokens"),
    "unit_tokens": (["store.unit_tokens=64"], "run.unit_tokens"),
    "chunk_rows": (["store.chunk_rows=64"], "chunks of"),
    "compression": (["store.compression=3"], "store.compression"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_job_is_refused_naming_the_difference(change, tmp_path):
    sets, named = CHANGES[change]
    job, store = make(tmp_path)
    harness.actdump("run", job).expect(harness.OK)
    before = contents(store)
    outcome = harness.actdump("run", job, *(word for s in sets for word in ("--set", s))).expect(harness.USAGE)
    assert named in outcome.err and "another job" in outcome.err, outcome.err
    assert contents(store) == before


def test_every_difference_is_named_at_once(tmp_path):
    job, store = make(tmp_path)
    harness.actdump("run", job).expect(harness.OK)
    outcome = harness.actdump("run", job, "--set", "run.batch_tokens=32", "--set", "corpus.context=32").expect(harness.USAGE)
    assert "run.batch_tokens was 64 and is 32" in outcome.err and "corpus.context was 64 and is 32" in outcome.err


def test_a_changed_checkpoint_or_corpus_is_refused(tmp_path):
    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "model")
    job, store = make(tmp_path / "job", checkpoint=checkpoint)
    harness.actdump("run", job).expect(harness.OK)
    weights = bytearray((checkpoint / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (checkpoint / "model.safetensors").write_bytes(weights)
    assert "model.digest" in harness.actdump("run", job).expect(harness.USAGE).err
    weights[-3] ^= 1
    (checkpoint / "model.safetensors").write_bytes(weights)
    moved = shutil.copytree(checkpoint, tmp_path / "elsewhere")  # the same weights in another place are the same model
    harness.actdump("run", job, "--set", f"model.checkpoint={moved}").expect(harness.OK)
    tokens = bytearray((tmp_path / "job/tokens.bin").read_bytes())
    tokens[0] ^= 1
    (tmp_path / "job/tokens.bin").write_bytes(tokens)
    assert "corpus" in harness.actdump("run", job).expect(harness.USAGE).err


def test_two_jobs_on_one_store_the_second_is_refused(tmp_path):
    lengths = [64] * 3000
    job, store = make(tmp_path, lengths, captures={"all": {"values": ["*"], "layers": "all"}})
    process = jobs.start(job)
    try:
        jobs.wait_for_segments(store, 1, process)
        outcome = harness.actdump("run", job).expect(harness.USAGE)
        assert "another job is writing this store" in outcome.err and str(process.pid) in outcome.err
        jobs.kill([process.pid])
        process.wait(timeout=10)
    finally:
        jobs.end_all(process)
    outcome = harness.actdump("run", job, "--set", "run.time_limit=4", "--set", "run.grace_seconds=2")
    assert outcome.status in (harness.OK, harness.STOPPED), outcome.err  # a dead job leaves no lock


def test_segments_without_store_json_are_not_touched(tmp_path):
    job, store = make(tmp_path)
    harness.actdump("run", job).expect(harness.OK)
    (store / "store.json").unlink()
    before = harness.segment_bytes(store)
    outcome = harness.actdump("run", job).expect(harness.INPUT)
    assert "no store.json" in outcome.err
    assert harness.segment_bytes(store) == before
