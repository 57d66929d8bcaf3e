"""A run from its configuration to its summary, on this machine.

    check everything ─► open the run directory ─► resume or begin ─► drive ─► export and summarise

What can be wrong with model, prompts, rewards or batch arithmetic is found before the run directory is
touched. Re-running the same configuration resumes at the newest whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

import spotlight
from spotlight.config.contradictions import batch_problems
from spotlight.config.errors import ConfigError
from spotlight.config.load import dump_config
from spotlight.config.schema import RESUMABLE_KEYS, RunConfig
from spotlight.core.controller import Controller
from spotlight.core.types import Prompt, PromptId, WorkerId
from spotlight.rewards.pool import RewardPool
from spotlight.runtime import build
from spotlight.runtime.book import CONTROLLER_FILE, LEARNER_FOLDER, Book, Bystander, RunBook
from spotlight.runtime.clock import PhaseClock
from spotlight.runtime.denoise import Denoiser
from spotlight.runtime.disk import require_disk
from spotlight.runtime.finished import finished_summary
from spotlight.runtime.inline.driver import InlineDriver, Parts
from spotlight.runtime.learning import Learning, assemble, fill_embeddings, prepare_model
from spotlight.runtime.memory import memory_told_plainly
from spotlight.runtime.observer import Observer
from spotlight.runtime.outcome import export_judged, finish_run
from spotlight.runtime.process import prepare_process
from spotlight.store.checkpoints import Checkpoint, CheckpointStore
from spotlight.store.errors import StoreError
from spotlight.store.images import drop_pictures
from spotlight.store.ledger import Ledger
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.metrics import MetricsWriter, Sink
from spotlight.store.run_directory import RunDirectory, RunPaths
from spotlight.store.schema import Ending
from spotlight.store.sinks import TensorBoard, WeightsAndBiases, require_wandb
from spotlight.store.summary import RunSummary
from spotlight.training.sharding import Ranks, process_group

log = logging.getLogger("spotlight")


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Attributes:
        summary: None when nothing was finished (stopped early, or with an error).
        error: why the controller stopped the run, with the remedy.
        stopped: ended by a signal, after a committed checkpoint; the same command resumes it.
    """

    directory: Path
    summary: RunSummary | None
    error: str | None
    stopped: bool


@dataclass(frozen=True, slots=True)
class _Materials:
    """What was checked and loaded before the run directory is touched."""

    config: RunConfig
    ranks: Ranks
    prompts: build.Prompts
    learning: Learning
    denoiser: Denoiser
    rewards: RewardPool


def train(config: RunConfig, observer: Observer) -> RunResult:
    """Run, or resume, a configuration to its end. A run that is at its end already returns at once.

    Raises:
        ConfigError, PromptFileError, ModelError, RewardSetupError, RewardInputError: before any work.
        StoreError: the run directory or the disk.
        DeviceMemoryError: the device has too little memory.
        TrainingError: the learner cannot go on (gradients that are not finite).
    """
    clock = PhaseClock()
    if (summary := finished_summary(config)) is not None:
        observer.note(f"finished before: {summary.validation[-1].iteration} iterations are trained")
        return RunResult(config.runs_dir / config.name, summary, None, stopped=False)
    device = build.pick_device(config)
    prepare_process(device, config.deterministic)
    with ExitStack() as stack, memory_told_plainly(clock):
        ranks = stack.enter_context(process_group(device))
        materials = _gather(config, device, ranks, stack)
        for note in materials.prompts.notes(config):
            observer.note(note)
        if not ranks.is_main:
            return _drive(
                materials, observer, clock, Bystander(ranks, _by_id(materials), config.evaluation.strict)
            )
        require_disk(config)
        directory = stack.enter_context(
            RunDirectory.open(config.runs_dir, config.name, dump_config(config), RESUMABLE_KEYS)
        )
        return _as_main(materials, directory, observer, clock, stack)


# -- before the run directory --------------------------------------------------------------------------


def _gather(config: RunConfig, device: torch.device, ranks: Ranks, stack: ExitStack) -> _Materials:
    if problems := list(batch_problems(config, ranks.world)):
        raise ConfigError(f"this configuration on {ranks.world} ranks", problems)
    if config.metrics.wandb is not None:
        require_wandb()
    prompts = build.load_prompts(config)
    model = prepare_model(config, device)
    rewards = stack.enter_context(build.make_reward_pool(config))
    used = prompts.used(config)
    rewards.check([prompt.text for prompt in used], [prompt.metadata for prompt in used])
    conditions = fill_embeddings(config, model, used, ranks)
    learning = assemble(config, model, conditions, ranks)
    engine = build.make_engine(config, model.family, learning.negative)
    denoiser = Denoiser(
        engine,
        learning.slots,
        conditions,
        model.recipes,
        model.algorithm.rollout_slot,
        config.evaluation.weights,
    )
    return _Materials(config, ranks, prompts, learning, denoiser, rewards)


# -- the main rank's run directory ---------------------------------------------------------------------


def _as_main(
    materials: _Materials, directory: RunDirectory, observer: Observer, clock: PhaseClock, stack: ExitStack
) -> RunResult:
    config, ranks = materials.config, materials.ranks
    ledger = stack.enter_context(Ledger(directory.ledger))
    checkpoints = CheckpointStore(directory.checkpoints, config.checkpoint.keep)
    newest = checkpoints.newest_valid()
    before_s = ledger.worked_s()
    resume_at = newest.header.iteration if newest else 0
    # What can fail here fails before an attempt is opened, which somebody would have to close.
    metrics = stack.enter_context(
        MetricsWriter(directory, resume_at=resume_at, sinks=_sinks(config, directory, resume_at))
    )
    drop_pictures(directory, resume_at=resume_at)
    workers = {WorkerId(f"rank-{rank}"): config.fleet.price_usd_h for rank in range(ranks.world)}
    attempt = ledger.begin_attempt(
        pid=os.getpid(), host=socket.gethostname(), workers=workers, now_s=time.time() - clock.elapsed_s
    )
    book = RunBook(
        paths=directory,
        ledger=ledger,
        checkpoints=checkpoints,
        metrics=metrics,
        ranks=ranks,
        workers=workers,
        prompts=_by_id(materials),
        header=CheckpointHeader(0, 0, config_digest(config), spotlight.__version__),
        strict=config.evaluation.strict,
        grid_images=config.evaluation.grid_images,
        before_s=before_s,
    )
    try:
        stack.enter_context(_attempt_log(directory.attempt_log(attempt)))
        _say_where(newest, observer, attempt)
        forgotten = ledger.rollback(newest.header.ledger_position if newest else 0, attempt)
        if forgotten:
            observer.note(
                f"{forgotten} ledger records after the checkpoint are undone and will be made again"
            )
        result = _drive(materials, observer, clock, book, newest)
    except BaseException as error:
        if isinstance(error, Exception):
            log.exception("the run failed")
        ending = Ending.STOPPED if isinstance(error, KeyboardInterrupt) else Ending.FAILED
        with suppress(StoreError):  # a full disk takes this neither; then the next attempt closes this one
            _close_account(ledger, book, clock, ending)
        raise
    ending = Ending.STOPPED if result.stopped else Ending.FAILED if result.error else Ending.FINISHED
    _close_account(ledger, book, clock, ending)
    return result


def _close_account(ledger: Ledger, book: RunBook, clock: PhaseClock, ending: Ending) -> None:
    book.spend(clock.take())
    ledger.end_attempt(ending, time.time())


def _drive(
    materials: _Materials,
    observer: Observer,
    clock: PhaseClock,
    book: Book,
    newest: Checkpoint | None = None,
) -> RunResult:
    config, ranks = materials.config, materials.ranks
    controller = _resume(materials, newest)  # all ranks meet here: from now on the run directory exists
    materials.rewards.log_to(
        RunPaths(config.runs_dir / config.name).attempts, prefix=f"rank-{ranks.rank}-reward"
    )
    driver = InlineDriver(
        Parts(
            controller=controller,
            denoiser=materials.denoiser,
            trainer=materials.learning.trainer,
            rewards=materials.rewards,
            book=book,
            clock=clock,
            observer=observer,
            ranks=ranks,
            lease_size=config.rollout.batch_size * ranks.world,
            grid=(config.evaluation.grid_prompts, config.evaluation.grid_images),
        )
    )
    clock.ready()
    with _signals(driver, observer):
        error = driver.run()
    directory = config.runs_dir / config.name
    if error is not None or driver.stopped:
        return RunResult(directory, None, error, driver.stopped)
    learning = materials.learning
    weights = export_judged(config, learning.model.family, learning.slots, ranks)
    summary = finish_run(config, book, weights, clock) if isinstance(book, RunBook) else None
    return RunResult(directory, summary, None, stopped=False)


def _resume(materials: _Materials, newest: Checkpoint | None) -> Controller:
    """The controller and learner of the newest checkpoint, the same on all ranks."""
    config, ranks = materials.config, materials.ranks
    plan = build.plan_of(config, ranks.world)
    (where, *_) = ranks.share(str(newest.directory) if newest else "")
    if not where:
        return Controller(plan, materials.prompts.train, materials.prompts.test)
    materials.learning.learner.load(Path(where) / LEARNER_FOLDER)
    snapshot = json.loads((Path(where) / CONTROLLER_FILE).read_text())
    return Controller.restore(plan, materials.prompts.train, materials.prompts.test, snapshot)


def _by_id(materials: _Materials) -> dict[PromptId, Prompt]:
    prompts = materials.prompts
    return {prompt.id: prompt for prompt in (*prompts.train, *prompts.test)}


def _say_where(newest: Checkpoint | None, observer: Observer, attempt: int) -> None:
    if newest is None:
        if attempt > 1:
            observer.note(
                f"attempt {attempt}: no checkpoint was committed before, so this starts from the beginning"
            )
        return
    for damage in newest.damages:
        observer.note(f"damaged checkpoint passed over: {damage}")
    observer.note(
        f"attempt {attempt}: resuming after iteration {newest.header.iteration} from {newest.directory}"
    )


def config_digest(config: RunConfig) -> str:
    """SHA-256 of the resolved configuration."""
    return hashlib.sha256(dump_config(config).encode()).hexdigest()


def _sinks(config: RunConfig, paths: RunPaths, resume_at: int) -> tuple[Sink, ...]:
    sinks: list[Sink] = []
    if config.metrics.tensorboard:
        sinks.append(TensorBoard(paths, resume_at=resume_at))
    if config.metrics.wandb is not None:
        wandb = config.metrics.wandb
        sinks.append(WeightsAndBiases(paths, project=wandb.project, entity=wandb.entity))
    return tuple(sinks)


class _AttemptLog(logging.FileHandler):
    """A log that a full disk cuts short; the run's own error is the one to tell."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Nothing."""

    def close(self) -> None:
        """Close, whether or not the rest can be written."""
        with suppress(OSError):
            super().close()


@contextmanager
def _attempt_log(path: Path) -> Iterator[None]:
    handler = _AttemptLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    level, root.level = root.level, min(root.level, logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


@contextmanager
def _signals(driver: InlineDriver, observer: Observer) -> Iterator[None]:
    """SIGTERM and the first SIGINT stop after the next checkpoint; a second SIGINT stops at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        driver.request_stop()
        observer.note(
            f"{signal.Signals(number).name}: stopping after the next checkpoint; the same command resumes"
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
