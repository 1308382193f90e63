"""Running jobs that are watched, stopped and killed while they run."""
import os
import signal
import subprocess
import time
from pathlib import Path

import harness


def start(job, ranks=None, *arguments, env=None):
    """Starts actdump run in a process group of its own; its output goes to files beside the job."""
    job = Path(job)
    out, err = (open(job.parent / f"{job.stem}.{kind}", "ab") for kind in ("out", "err"))
    try:
        return subprocess.Popen(harness.command("run", job, *arguments, ranks=ranks), stdin=subprocess.DEVNULL, stdout=out,
                                stderr=err, env=harness.environment(**harness.without_leaks(("run",)), **(env or {})),
                                start_new_session=True)
    finally:
        out.close()
        err.close()


def log_of(job):
    return Path(job).with_suffix(".err").read_text(errors="replace")


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def rank_pids(process):
    """The processes of a started job that are actdump itself: the ranks, in the order of their ids."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            program = os.readlink(entry / "exe")
        except OSError:
            continue
        pid = int(entry.name)
        if program == str(harness.ACTDUMP.resolve()) and (pid == process.pid or parent_of(pid) == process.pid):
            found.append(pid)
    return sorted(found)


def wait_for_ranks(process, n, timeout=30):
    """Waits until n ranks are there, and returns their process ids (fewer where the job ends first)."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        pids = rank_pids(process)
        if len(pids) >= n or process.poll() is not None:
            return pids
        time.sleep(0.01)
    raise AssertionError(f"{n} ranks did not start within {timeout} s")


def kill(pids, number=signal.SIGKILL):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def wait_for_segments(store, n, process, timeout=60):
    """Waits until n segments are committed or the job ends."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if len(harness.segments(store)) >= n:
            return
        time.sleep(0.01)
    assert process.poll() is not None, f"{n} segments were not there within {timeout} s"


def end_all(process):
    """Whatever happened, nothing of the job stays behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
