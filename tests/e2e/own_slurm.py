"""A SLURM of this test's own: munged, slurmctld, and a slurmd for each of several nodes, all on 127.0.0.1.

Needs Debian's slurmctld, slurmd, slurm-client and munge, and, with control groups, root. Its jobs come from a
clone whose ``launch/`` is this repository's.
"""

from __future__ import annotations

import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
PATIENCE_S = 240.0
"""For anything that should happen: far more than it takes."""
GRACE_S = 60
"""Of the partition whose jobs are preempted."""
NODES = 4
START_S = 30.0
"""For the daemons."""

_CONFIGURATION = """
ClusterName=spotlight
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
CredType=cred/munge
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/%n.pid
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{task}
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=200000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
ReturnToService=2
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs={cpus} Gres=gpu:1
PartitionName=reserved Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=preemptible Nodes=ALL PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
_CONTROL_GROUPS = "CgroupAutomount=yes\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n"


@dataclass(frozen=True)
class Slurm:
    """What a user of the cluster does. Jobs are named by their number, as text."""

    clone: Path
    environment: dict[str, str]

    def run(self, *command: str, more: dict[str, str] | None = None) -> str:
        """What a command printed; it must succeed."""
        done = subprocess.run(
            command, cwd=self.clone, env=self.environment | (more or {}), capture_output=True,
            text=True, encoding="utf-8", check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **more: str) -> str:
        """The number of a new job; ``more``: environment variables."""
        return self.run("sbatch", "--parsable", *arguments, more=more)

    def state(self, job: str) -> str:
        """As SLURM names it: ``RUNNING``, ``PENDING``, ``COMPLETED``, ..."""
        return self.shown(job)["JobState"]

    def shown(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self, job: str) -> str:
        """What the job's shell and its steps printed."""
        try:
            return Path(self.shown(job)["StdOut"]).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def wait(self, what: str, happened: Callable[[], bool], *jobs: str) -> None:
        """Until something has happened; the logs of ``jobs`` say why it did not."""
        end_s = time.monotonic() + PATIENCE_S
        while not happened():
            failed = any(self.state(job) == "FAILED" for job in jobs) and not happened()
            if failed or time.monotonic() > end_s:
                logs = "".join(f"\n-- {job} {self.state(job)}\n{self.log(job)}" for job in jobs)
                raise AssertionError(f"not {what}:\n{self.run('squeue')}{logs}")
            time.sleep(0.2)

    def wait_for_log(self, job: str, text: str, times: int = 1) -> None:
        """Until a job's log has ``text``."""
        self.wait(f"printed: {text!r}", lambda: self.log(job).count(text) >= times, job)

    def wait_for_state(self, job: str, state: str, *others: str) -> None:
        """Until a job is in that state."""
        self.wait(f"{job} {state}", lambda: self.state(job) == state, job, *others)

    def processes(self, job: str) -> dict[int, str]:
        """Command lines of living processes that a job started, whoever their parent is now."""
        return _with_environment(f"SLURM_JOB_ID={job}", f"SLURM_CONF={self.environment['SLURM_CONF']}")


@contextmanager
def own_slurm(control_groups: bool) -> Iterator[Slurm]:
    """Start one; nothing of it is left afterwards.

    Raises RuntimeError, with a daemon's last words, where this machine does not let it start.
    """
    with TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, ExitStack() as stack:
        base = Path(folder)
        environment = os.environ | {
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": f"{base}/slurm.conf",
            "SPOTLIGHT_IP": "127.0.0.1",
            "RAY_OVERRIDE_RESOURCES": '{"spotlight_slot": 1}',
            "RAY_worker_niceness": "0",
            "SPT_NOENV": "1",  # or Ray's processes overwrite their environment, by which they are found
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}",
        }
        slurm = Slurm(_clone(base), environment)
        # Jobs of several such clusters share /tmp/ray-JOB and ports by it.
        first_job = random.randrange(1, 10**7)
        _configure(base, control_groups, first_job)
        stack.callback(_remove_ray_files, first_job)
        stack.callback(_end_processes, environment["SLURM_CONF"])
        munge = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        daemons = {
            "munged": [
                "--foreground",
                "--force",
                *(f"--{key}={base}/munge/{name}" for key, name in munge.items()),
            ],
            "slurmctld": ["-D", "-i"],
            **{f"slurmd -N n{number}": ["-D"] for number in range(1, NODES + 1)},
        }
        for name, options in daemons.items():
            stack.enter_context(_daemon(name, options, base, environment))
        _until_idle(slurm, base)
        try:
            yield slurm
        finally:
            slurm.run("scancel", "--quiet", "--me")


def _clone(base: Path) -> Path:
    clone, repository = base / "clone", Path(__file__).parents[2]
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / "launch").symlink_to(repository / "launch")
    activate = f"export PATH={Path(sys.executable).parent}:$PATH\n"
    (clone / ".venv" / "bin" / "activate").write_text(activate, encoding="utf-8")
    return clone


def _configure(base: Path, control_groups: bool, first_job: int) -> None:
    for name in ("munge", "state", *(f"n{number}" for number in range(1, NODES + 1))):
        (base / name).mkdir(mode=0o700)
    base.chmod(0o755)  # munged wants to see its socket's directory
    key = base / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    port, *ports = _free_ports(1 + NODES)
    (base / "slurm.conf").write_text(
        _CONFIGURATION.format(
            base=base, host=socket.gethostname().partition(".")[0], user=getpass.getuser(), port=port,
            first_job=first_job, ports=",".join(map(str, ports)), nodes=NODES, cpus=os.cpu_count(),
            grace_s=GRACE_S, tracking="cgroup" if control_groups else "linuxproc",
            task="cgroup" if control_groups else "none",
        ), encoding="utf-8",
    )  # fmt: skip
    (base / "gres.conf").write_text("Name=gpu File=/dev/null\n", encoding="utf-8")
    if control_groups:
        (base / "cgroup.conf").write_text(_CONTROL_GROUPS, encoding="utf-8")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


@contextmanager
def _daemon(name: str, options: list[str], base: Path, environment: dict[str, str]) -> Iterator[None]:
    with (base / f"{name.replace(' ', '')}.out").open("ab") as output:
        process = subprocess.Popen(
            [*name.split(), *options], env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _until_idle(slurm: Slurm, base: Path) -> None:
    asked = ["sinfo", "--noheader", "--partition=reserved", "--states=idle", "--format=%D"]
    end_s = time.monotonic() + START_S
    while True:
        done = subprocess.run(
            asked, env=slurm.environment, capture_output=True, text=True, encoding="utf-8", check=False
        )
        if done.stdout.strip() == str(NODES):
            return
        if time.monotonic() > end_s:
            last = (f"{each.name}: {each.read_text(encoding='utf-8')[-500:]}" for each in base.glob("*.out"))
            raise RuntimeError(f"no {NODES} idle nodes after {START_S:g} s: {'; '.join(last)}")
        time.sleep(0.2)


def _with_environment(*entries: str) -> dict[int, str]:
    wanted = {entry.encode() for entry in entries}
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                command = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(path.parent.name)] = command
    return {pid: command for pid, command in found.items() if pid != os.getpid()}


def _remove_ray_files(first_job: int) -> None:
    for job in range(first_job, first_job + 100):
        shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)


def _end_processes(configuration: str) -> None:
    """Whatever a failed test has left."""
    for pid in _with_environment(f"SLURM_CONF={configuration}"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
