"""Threads where OpenMP binds its own (OMP_PROC_BIND, OMP_PLACES), as clusters have it do: there the first thread is on one
processor before main begins."""
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

import harness

PROCESSORS = os.sched_getaffinity(0)
BOUND = {"OMP_PROC_BIND": "true", "OMP_PLACES": "threads"}
needs_two = pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor: there is nothing to bind apart")


def make_job(folder, n_documents):
    corpus = harness.write_corpus(folder / "tokens", harness.random_documents(3, [300] * n_documents))
    return harness.make_job(folder, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, context=256,
                            captures={"all": {"values": ["*"], "layers": "all"}})


def threads_of(process):
    """{the thread's number: (its niceness, the processors it may run on)} now."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        try:
            found[int(task.name)] = (int((task / "stat").read_text().rsplit(")", 1)[1].split()[16]),
                                     os.sched_getaffinity(int(task.name)))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


@needs_two
def test_all_processors_are_counted(tmp_path):
    job, store = make_job(tmp_path, 2)
    harness.actdump("run", job, env=BOUND).expect(harness.OK)
    backend = json.loads((store / "store.json").read_text())
    assert f"{len(PROCESSORS)} threads" in json.dumps(backend)


@needs_two
def test_what_compresses_is_not_bound_to_the_first_thread(tmp_path):
    """Compressing threads are those that step back: their niceness is higher than that of the first."""
    job, _ = make_job(tmp_path, 60)
    process = subprocess.Popen(harness.command("run", job), env=harness.environment(**BOUND), stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first, workers = None, []
    while process.poll() is None and not workers:
        time.sleep(0.005)
        threads = threads_of(process)
        first = threads.get(process.pid, first)
        workers = [t for t in threads.values() if first is not None and t[0] > first[0]]
    process.wait(timeout=200)
    assert process.returncode == harness.OK
    assert len(first[1]) == 1  # OpenMP did bind it
    assert workers and all(processors == PROCESSORS for _, processors in workers)
