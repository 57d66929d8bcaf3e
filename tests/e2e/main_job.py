"""The main job on a tiny model: run here, or in a process that is sent signals at chosen moments.

Processes are forked from a server that has torch loaded, so that each costs no more than its work; what
kills them is a real SIGKILL. A moment is a step of work that the observer hears of, or a file operation in
the run directory just before it happens, so a process can be killed within a checkpoint, not only around it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fragile_disk import cut_power, turn_read_only
from safetensors.torch import load_file
from torch import Tensor

from spotlight.cli.runs.train import configuration_of, driver_of, in_a_folder
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.runtime.attempt import RunResult
from spotlight.runtime.observer import Observer
from spotlight.scheduler.types import Phase
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits, AuditReport, audit
from spotlight.store.metrics import MetricsRow, read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import read_summary

TINY = (
    "device=cpu",
    "data.tags=[]",
    "data.train=testbed",
    "data.test=testbed",
    "iterations=4",
    "rollout.height=16",
    "rollout.width=16",
    "rollout.steps=3",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=3",
    "rollout.batch_size=8",
    "evaluation.every=2",
    "evaluation.prompts=2",
    "evaluation.images_per_prompt=2",
    "evaluation.grid_images=2",
    "evaluation.steps=2",
    "learner.lora.rank=4",
    "learner.lora.alpha=8.0",
    "learner.learning_rate=0.03",
    "learner.decay_iterations=null",
    "metrics.tensorboard=false",
    "rewards=[{name: jpeg_size}]",
)
NFT = ("algorithm.name=diffusion-nft", "algorithm.train_timesteps=2", "learner.ema.every=2")
GRPO = (
    "algorithm.name=flow-grpo",
    "algorithm.kl_weight=0.01",
    "rollout.sampler=flow-sde",
    "learner.updates_per_batch=2",
)
ALGORITHMS = {"diffusion-nft with EMA": NFT, "flow-grpo, 2 updates": GRPO}
ONE_AT_ONCE = [
    pytest.param(name, marks=() if parameters is NFT else pytest.mark.slow)
    for name, parameters in ALGORITHMS.items()
]
"""For whole runs of which one will do, but for the longer tier; parts are tested with every one."""
CHECKPOINTED = AuditLimits(group_size=3)

PROCESS_DEADLINE_S = 280
_MAY_NOT_MOUNT = 77
_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Job:
    """Where runs of the tests lie, and what they share."""

    root: Path
    pipeline: Path

    def arguments(self, name: str, *overrides: str) -> list[str]:
        """A run's overrides, as on the command line."""
        places = (f"runs_dir={self.root}", f"cache_dir={self.root}/cache", f"model.path={self.pipeline}")
        return [f"name={name}", *places, *TINY, *overrides]

    def config(self, name: str, *overrides: str) -> RunConfig:
        """A run's configuration."""
        return load_config(None, self.arguments(name, *overrides))

    def train(self, name: str, *overrides: str) -> RecordedRun:
        """Run in this process."""
        recorded = RecordedRun()
        config = self.config(name, *overrides)
        recorded.result = driver_of(config)(config, recorded)
        _require_summary(recorded.result)
        return recorded


def _require_summary(result: RunResult) -> None:
    """Raise StoreError if a run that has ended left none."""
    if result.finished:
        read_summary(RunPaths(result.directory).summary)


@dataclass
class RecordedRun(Observer):
    """What an observer was called with, and the result."""

    notes: list[str] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    costs_usd: list[float] = field(default_factory=list)
    result: RunResult | None = None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def billed(self, cost_usd: float) -> None:
        self.costs_usd.append(cost_usd)

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        self.iterations.append(iteration)

    @property
    def error(self) -> str:
        assert self.result is not None
        assert self.result.error is not None
        return self.result.error


# -- a process of its own ------------------------------------------------------------------------------


FILL_DISK, READ_ONLY, POWER_CUT = -1, -2, -3
"""Instead of a signal: take up all that is left of the run's disk (see :func:`run_on_small_disk`); let the
disk meet an error; cut its power (``fragile_disk.py``)."""


@dataclass(frozen=True)
class At:
    """Send this process a signal at the ``count``-th moment whose label has ``label`` in it."""

    label: str
    count: int = 1
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class Ended:
    """How a process ended; a killed one has written nothing."""

    exit_code: int | None
    notes: tuple[str, ...] = ()
    iterations: tuple[int, ...] = ()
    finished: bool = False
    stopped: bool = False
    error: str | None = None
    moments: tuple[str, ...] = ()


class _Moments(RecordedRun):
    """Counts moments, and sends the signals."""

    def __init__(self, directory: Path, signals: Sequence[At]) -> None:
        super().__init__()
        self.labels: list[str] = []
        self._signals, self._met = signals, Counter[At]()
        self._directory = str(directory)
        sys.addaudithook(self._audit)

    def work(self, phase: Phase, done: int, total: int) -> None:
        self._moment(f"work {phase.value}")

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove"):
            paths = [str(each) for each in arguments if isinstance(each, str | os.PathLike)]
            if paths and paths[-1].startswith(self._directory):
                self._moment(f"{event} {paths[-1].removeprefix(self._directory)}")

    def _moment(self, label: str) -> None:
        self.labels.append(label)
        for each in self._signals:
            if each.label in label:
                self._met[each] += 1
                if self._met[each] == each.count:
                    self._do(each.signal)

    def _do(self, number: int) -> None:
        if number == READ_ONLY:
            turn_read_only(Path(self._directory))
            return
        if number == POWER_CUT:
            cut_power(Path(self._directory))
            number = signal.SIGKILL
        if number != FILL_DISK:
            os.kill(os.getpid(), number)
            return
        ballast = os.open(Path(self._directory).parent / "ballast", os.O_WRONLY | os.O_CREAT)
        with suppress(OSError):  # no space left
            while os.write(ballast, bytes(4096)):
                pass
        os.close(ballast)


def _work(arguments: list[str], signals: Sequence[At], answer: Path) -> None:
    config = configuration_of(arguments)
    observer = _Moments(config.runs_dir / config.name, signals)
    try:
        with in_a_folder(config, observer.note) as config:
            result = driver_of(config)(config, observer)
        if int(os.environ.get("RANK", "0")) == 0:
            _require_summary(result)
        ended = {
            "finished": result.finished,
            "stopped": result.stopped,
            "error": result.error,
        }
    except Exception as error:  # noqa: BLE001  (whatever it is, the test must know of it)
        ended = {"error": f"{type(error).__name__}: {error}"}
    ended |= {"notes": observer.notes, "iterations": observer.iterations, "moments": observer.labels}
    answer.write_text(json.dumps(ended), encoding="utf-8")


def run_process(arguments: list[str], *signals: At, answer: Path) -> Ended:
    """Run in a process of its own, sending it ``signals``."""
    answer.unlink(missing_ok=True)
    process = _processes.Process(target=_work, args=(arguments, signals, answer))
    process.start()
    process.join(PROCESS_DEADLINE_S)
    return _ended(process.exitcode, answer)


def free_port() -> int:
    """Nobody listens on it yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def run_ranks(world: int, arguments: list[str], *signals: At, answer: Path) -> list[Ended]:
    """Run in as many processes as torchrun would start, each told its rank as torchrun tells it."""
    port = free_port()
    answers = [answer.with_suffix(f".{rank}") for rank in range(world)]
    ranks = []
    for rank, each in enumerate(answers):
        each.unlink(missing_ok=True)
        names = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        environment = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}
        ranks.append(_processes.Process(target=_work_as_rank, args=(environment, arguments, signals, each)))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PROCESS_DEADLINE_S)
    hanging = [process for process in ranks if process.exitcode is None]
    for process in hanging:
        process.kill()
    assert not hanging, "ranks wait for each other"
    return [_ended(process.exitcode, each) for process, each in zip(ranks, answers, strict=True)]


def _work_as_rank(
    environment: dict[str, str], arguments: list[str], signals: Sequence[At], answer: Path
) -> None:
    os.environ.update(environment)
    _work(arguments, signals, answer)


def _ended(exit_code: int | None, answer: Path) -> Ended:
    assert exit_code is not None, "the process hangs"
    written = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    return Ended(exit_code, **{key: tuple(v) if isinstance(v, list) else v for key, v in written.items()})


def run_on_small_disk(arguments: list[str], *signals: At, answer: Path, kept: Path) -> Ended | None:
    """As :func:`run_process`, with the run directory on a disk of 64 MiB that only that process sees.

    Args:
        kept: where the run directory is copied to afterwards.

    Returns:
        None where this user may not mount one.
    """
    answer.unlink(missing_ok=True)
    process = _processes.Process(target=_work_on_small_disk, args=(arguments, signals, answer, kept))
    process.start()
    process.join(PROCESS_DEADLINE_S)
    return _ended(process.exitcode, answer) if process.exitcode != _MAY_NOT_MOUNT else None


def _work_on_small_disk(arguments: list[str], signals: Sequence[At], answer: Path, kept: Path) -> None:
    config = load_config(None, arguments)
    config.runs_dir.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    new_user = 0 if os.geteuid() == 0 else 0x10000000
    private, size = 1 << 18 | 1 << 14, b"size=64m"  # MS_PRIVATE, with all below
    if (
        libc.unshare(0x20000 | new_user)  # a mount namespace of its own
        or libc.mount(None, b"/", None, private, None)
        or libc.mount(b"tmpfs", os.fsencode(config.runs_dir), b"tmpfs", 0, size)
    ):
        os._exit(_MAY_NOT_MOUNT)
    _work(arguments, signals, answer)
    shutil.copytree(config.runs_dir / config.name, kept)


# -- what came of a run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What must be equal in two runs of one configuration, and the rest that must hold of each."""

    ledger: str
    learner: str
    metrics: tuple[tuple[int, int, Mapping[str, float]], ...]

    @property
    def validation(self) -> list[tuple[int, int, Mapping[str, float]]]:
        """The rows of validations."""
        return [row for row in self.metrics if "validation/graded" in row[2]]


Straight = Callable[[str], tuple[Path, Outcome, Ended]]
"""The run directory, outcome and end of an uninterrupted run, by its algorithm's name."""


def outcome(run: Path) -> Outcome:
    """Read a run's outcome from its directory."""
    connection = queries.open_readonly(RunPaths(run).ledger)
    try:
        return Outcome(
            queries.digest(connection), learner_digest(run), tuple(map(_timeless, read_metrics(run)))
        )
    finally:
        connection.close()


def learner_digest(run: Path) -> str:
    """SHA-256 of the learner's files (weights, optimizer, EMA, counters) in the newest checkpoint."""
    hasher = hashlib.sha256()
    files = (path for path in (newest_checkpoint(run) / "learner").rglob("*") if path.is_file())
    for path in sorted(files):
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()


def lora(run: Path) -> dict[str, Tensor]:
    """The exported adapter."""
    return load_file(run / "lora" / "pytorch_lora_weights.safetensors")


def largest_difference(first: Path, second: Path) -> float:
    """Between the adapters of two runs, whose exported B are times alpha / rank."""
    ours, theirs = lora(first), lora(second)
    assert ours.keys() == theirs.keys()
    scales = {True: 8 / 4, False: 1}
    return max(
        float((tensor - theirs[name]).abs().max()) / scales[".lora_B." in name]
        for name, tensor in ours.items()
    )


def newest_checkpoint(run: Path) -> Path:
    """The directory of the newest whole checkpoint."""
    newest = CheckpointStore(RunPaths(run).checkpoints, keep=9).newest_valid()
    assert newest is not None
    return newest.directory


def _timeless(row: MetricsRow) -> tuple[int, int, Mapping[str, float]]:
    values = {
        name: value
        for name, value in row.values.items()
        if not (name.startswith("seconds/") or name.endswith("_s") or "/capacity/" in name)
    }
    return row.iteration, row.samples_trained, values


def clean_audit(run: Path, limits: AuditLimits = CHECKPOINTED) -> AuditReport:
    """The run's audit, which must find nothing; and what was billed is what the phases sum to."""
    report = audit(run, limits)
    assert report.ok, report.violations
    assert all(bill.is_honest for bill in report.attempts)
    accounted_s = sum(bill.accounted_s for bill in report.attempts)
    assert sum(report.gpu_seconds_by_phase.values()) == pytest.approx(accounted_s)
    return report
