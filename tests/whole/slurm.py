"""A Slurm cluster of one node on this machine, for as long as a test needs it: munged, slurmctld and slurmd, as root.

Two partitions, `night` and `urgent`; a job in `urgent` preempts one in `night`, which is requeued."""
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/slurmd
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=pmix
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
InactiveLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=night Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes={host} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def why_not():
    """Why no cluster can be had here; None where one can."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    missing = [p for p in ("munged", "slurmctld", "slurmd", "sbatch", "scontrol") if shutil.which(p) is None]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm munge)" if missing else None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.daemons = []
        self.env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self):
        host = socket.gethostname().split(".")[0]
        for name in ("ctld", "slurmd"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        self.start_munge()
        (self.folder / "slurm.conf").write_text(CONFIG.format(
            host=host, folder=self.folder, cpus=os.cpu_count(), ctld_port=free_port(), slurmd_port=free_port()))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self.daemon("slurmctld", "-D")
        self.daemon("slurmd", "-D", "-N", host)
        self.wait("the node to be idle", lambda: "idle" in self.call("sinfo", "--noheader", "-o", "%T", check=False))

    def start_munge(self):
        key, socket_path = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        # munged distrusts folders that others may write to, /tmp among them: --force says that it is a test
        self.daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}",
                    f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
                    f"--seed-file={self.folder}/munged.seed")
        self.wait("munged", socket_path.exists)

    def daemon(self, *command):
        log = open(self.folder / f"{command[0]}.out", "wb")
        self.daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env,
                                             start_new_session=True))
        log.close()

    def call(self, *command, check=True, env=None):
        done = subprocess.run(command, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def wait(self, what, is_there, timeout=60):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if is_there():
                return
            time.sleep(0.2)
        raise AssertionError(f"waited {timeout} s for {what}: {self.logs()}")

    def state(self, job):
        """The state of a job, such as RUNNING, PENDING, COMPLETED."""
        shown = self.call("scontrol", "show", "job", str(job), check=False)
        return next((w.partition("=")[2] for w in shown.split() if w.startswith("JobState=")), "UNKNOWN")

    def restarts(self, job):
        shown = self.call("scontrol", "show", "job", str(job))
        return int(next(w.partition("=")[2] for w in shown.split() if w.startswith("Restarts=")))

    def submit(self, *arguments, env=None):
        return int(self.call("sbatch", "--parsable", *map(str, arguments), env=env).split(";")[0])

    def logs(self):
        texts = [f"\n--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in sorted(self.folder.glob("*.log"))]
        return "".join(texts)

    def stop(self):
        self.call("scancel", "--user=root", check=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
