"""Told to stop, by a signal to any rank or by a time limit, all ranks stop within the grace period, with status 75."""
import os
import signal
import time

import pytest

import harness
import jobs

GRACE = 5.0
LENGTHS = [64] * 4000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return harness.write_corpus(tmp_path_factory.mktemp("corpus") / "tokens", harness.random_documents(3, LENGTHS))


def long_job(folder, corpus, **run):
    """A job of minutes, in small units."""
    return harness.make_job(folder, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, context=64,
                            captures={"all": {"values": ["*"], "layers": "all"}}, store_options={"unit_tokens": 512},
                            run={"threads": 1, "batch_tokens": 64, "grace_seconds": GRACE, **run})


def expect_resumable(job, store):
    """What is committed is whole, nothing else lies about, and the log says how to go on."""
    log = jobs.log_of(job)
    assert "goes on from here" in log, log[-2000:]
    assert harness.segments(store) and not harness.looks_whole(store)
    assert not list((store / "segments").glob(".*.tmp"))
    shown = harness.actdump("verify", store).expect(harness.OK).out
    assert "the store is not complete" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_signal_to_one_rank_stops_all(number, victim, corpus, tmp_path):
    job, store = long_job(tmp_path, corpus)
    process = jobs.start(job, 3)
    try:
        pids = jobs.wait_for_ranks(process, 3)
        jobs.wait_for_segments(store, 2, process)
        os.kill(pids[victim], number)
        told = time.monotonic()
        process.wait(timeout=GRACE + 30)
        taken = time.monotonic() - told
    finally:
        jobs.end_all(process)
    assert process.returncode == harness.STOPPED, jobs.log_of(job)[-2000:]
    assert taken < GRACE + 2, f"{taken:.1f} s"
    expect_resumable(job, store)


def test_a_second_signal_stops_at_once(corpus, tmp_path):
    job, store = long_job(tmp_path, corpus, grace_seconds=60)
    process = jobs.start(job)
    try:
        jobs.wait_for_segments(store, 1, process)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        process.wait(timeout=10)
        assert time.monotonic() - told < 3
    finally:
        jobs.end_all(process)
    assert process.returncode == harness.STOPPED


def test_the_time_limit_stops_in_time(corpus, tmp_path):
    job, store = long_job(tmp_path, corpus, time_limit=8, grace_seconds=3)
    begun = time.monotonic()
    outcome = harness.actdump("run", job, ranks=2, timeout=60)
    assert outcome.status == harness.STOPPED, outcome.text
    assert 4 < time.monotonic() - begun < 8 + 5
    assert "time limit" in outcome.err


def test_a_stopped_job_goes_on_to_the_same_bytes(corpus, tmp_path):
    limit = {"corpus_options": {"limit": 400}}
    job, store = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, context=64,
                                  captures={"all": {"values": ["layer_output"], "layers": "all"}},
                                  store_options={"unit_tokens": 512}, run={"threads": 1, "batch_tokens": 64}, **limit)
    process = jobs.start(job, 2)
    try:
        jobs.wait_for_ranks(process, 2)
        jobs.wait_for_segments(store, 1, process)
        jobs.kill(jobs.rank_pids(process)[:1], signal.SIGUSR1)
        process.wait(timeout=60)
    finally:
        jobs.end_all(process)
    assert process.returncode in (harness.STOPPED, harness.OK)
    harness.actdump("run", job, ranks=3).expect(harness.OK)
    other = tmp_path / "other"
    other.mkdir()
    twin, reference = harness.make_job(other, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, context=64,
                                       captures={"all": {"values": ["layer_output"], "layers": "all"}},
                                       store_options={"unit_tokens": 512}, run={"threads": 1, "batch_tokens": 64}, **limit)
    harness.actdump("run", twin).expect(harness.OK)
    assert harness.segment_bytes(store) == harness.segment_bytes(reference)
