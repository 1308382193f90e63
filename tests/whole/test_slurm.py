"""The project's own sbatch script on a real Slurm of one node: preempted, requeued, finished, the same bytes."""
import pytest

import harness
import slurm

LENGTHS = [64] * 6000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = slurm.why_not()
    if reason:
        pytest.skip(reason)
    cluster = slurm.Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return harness.write_corpus(tmp_path_factory.mktemp("corpus") / "tokens", harness.random_documents(8, LENGTHS))


def make_job(folder, corpus, limit):
    folder.mkdir(exist_ok=True)
    return harness.make_job(folder, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, context=64,
                            captures={"all": {"values": ["layer_output", "linear_attn/*"], "layers": "all"}},
                            corpus_options={"limit": limit}, store_options={"unit_tokens": 1024},
                            run={"threads": 1, "batch_tokens": 64, "grace_seconds": 5})


def submit(cluster, folder, job, *options):
    script = harness.ROOT / "configs/nightly.sbatch"
    return cluster.submit("--partition=night", "--ntasks=2", "--cpus-per-task=1", f"--output={folder}/night.log",
                          *options, script, job, env={**harness.MPI_ENVIRONMENT, "ACTDUMP": str(harness.ACTDUMP)})


def test_preempted_requeued_and_finished(cluster, corpus, tmp_path):
    job, store = make_job(tmp_path, corpus, 4000)
    night = submit(cluster, tmp_path, job)
    cluster.wait("some segments", lambda: len(harness.segments(store)) >= 2 if store.exists() else False, timeout=120)
    urgent = cluster.submit("--partition=urgent", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 3")
    cluster.wait("the preemption", lambda: cluster.restarts(night) >= 1, timeout=120)
    assert not harness.looks_whole(store), "the job was over before it was preempted: give it more to do"
    cluster.wait("the urgent job", lambda: cluster.state(urgent) == "COMPLETED", timeout=120)
    # Slurm keeps a requeued job back for two minutes; the test does not
    cluster.call("scontrol", "update", f"JobId={night}", "StartTime=now", check=False)
    cluster.wait("the requeued job", lambda: cluster.state(night) in ("COMPLETED", "FAILED", "TIMEOUT"), timeout=400)
    log = (tmp_path / "night.log").read_text()
    assert cluster.state(night) == "COMPLETED", log[-3000:]
    assert "going on" in log and harness.looks_whole(store)
    twin, reference = make_job(tmp_path / "undisturbed", corpus, 4000)
    harness.actdump("run", twin).expect(harness.OK)
    assert harness.segment_bytes(store) == harness.segment_bytes(reference)
    harness.actdump("verify", store).expect(harness.OK)


def test_status_75_goes_back_into_the_queue(cluster, corpus, tmp_path):
    """What --signal does near the time limit: the ranks get USR1, stop in time, and the script requeues the job."""
    job, store = make_job(tmp_path, corpus, 6000)
    night = submit(cluster, tmp_path, job)
    cluster.wait("some segments", lambda: len(harness.segments(store)) >= 1 if store.exists() else False, timeout=120)
    cluster.call("scancel", "--signal=USR1", str(night))
    cluster.wait("the requeueing", lambda: cluster.restarts(night) >= 1, timeout=60)
    log = (tmp_path / "night.log").read_text()
    cluster.call("scancel", str(night))
    assert "goes on from here" in log, log[-3000:]
    assert harness.segments(store) and not harness.looks_whole(store)
