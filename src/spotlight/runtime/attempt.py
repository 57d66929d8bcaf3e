"""One attempt at a run: resumes at the newest checkpoint, and opens and closes its billing.

    with open_attempt(...) as attempt:
        attempt.result = ...            # drive, starting at attempt.newest

However the block ends, the ledger records how the attempt ended and where its seconds went.

Also the versions that a checkpoint was written with, what others may do to the rest of a run, and whether it
and the ledger belong together.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import spotlight
from spotlight.config.load import dump_config
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts
from spotlight.dry_run.estimating import estimate_run
from spotlight.runtime.observer import Observer
from spotlight.runtime.preflight import require_same_prompts
from spotlight.runtime.recorder import RunRecorder
from spotlight.runtime.resuming.course import changed_course
from spotlight.runtime.resuming.files_read import files_read, require_same_files
from spotlight.scheduler.types import WorkerId
from spotlight.store.checkpoints import Checkpoint, CheckpointStore
from spotlight.store.images import drop_pictures
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.course_changes import read_course
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.metrics import MetricsWriter
from spotlight.store.run_directory import RunDirectory, RunPaths
from spotlight.store.run_estimate import write_estimate
from spotlight.store.sinks import open_sinks
from spotlight.store.store_errors import DamagedCheckpointError, LedgerError
from spotlight.store.training_pictures import TrainingPictures
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.file_errors import StoreError, storage_errors
from spotlight_rewards.base.files import open_to_append
from spotlight_rewards.reward import RewardSetupError, same_scorer

log = logging.getLogger("spotlight")


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Attributes:
        error: why the controller stopped, with the remedy.
        stopped: by a signal, after a checkpoint; the same command resumes.
    """

    directory: Path
    error: str | None = None
    stopped: bool = False

    @property
    def finished(self) -> bool:
        """Whether no work is left; on the main rank the run directory has a summary then."""
        return self.error is None and not self.stopped


@dataclass(slots=True)
class Attempt:
    """An attempt's start and result.

    Attributes:
        newest: the checkpoint to resume from, if any.
        result: set it before the block ends.
    """

    number: int
    recorder: RunRecorder
    newest: Checkpoint | None
    result: RunResult | None = None


@contextmanager
def open_attempt(
    config: RunConfig,
    directory: RunDirectory,
    prompts: Prompts,
    ranks: Ranks,
    *,
    workers: Mapping[WorkerId, float],
    began_s: float,
    scored_by: Mapping[str, str],
    observer: Observer,
    account: Callable[[RunRecorder], None],
    keep_alive: Callable[[], None] = lambda: None,
) -> Iterator[Attempt]:
    """Begin an attempt by rolling back to the newest intact checkpoint. Main rank only.

    Args:
        workers: initial workers' price in USD per hour.
        began_s: start of the work, in seconds since the epoch.
        scored_by: what scores, by reward.
        account: called at the end, to bill the time since the last billing.
        keep_alive: see :class:`~spotlight.store.ledger.sqlite_ledger.SqliteLedger`.

    Raises:
        PromptFileError: other prompts than before.
        RewardSetupError: another model than before would score.
    """
    with ExitStack() as stack:
        # Fail before an attempt is begun, so that none is left to close.
        recorder, newest = _open_recorder(
            stack, config, directory, prompts, ranks, workers, scored_by, began_s, observer, keep_alive
        )
        kept, resume_at = (newest.header.ledger_position, newest.header.iteration) if newest else (0, 0)
        course = changed_course(config, directory, recorder.ledger, prompts, kept)
        number = recorder.ledger.begin_attempt(
            pid=os.getpid(), host=socket.gethostname(), workers=workers, now_s=began_s
        )
        observer.billed(recorder.ledger.cost_usd())
        attempt = Attempt(number, recorder, newest)
        with _closing(attempt, account):
            stack.enter_context(_attempt_log(directory.attempt_log(number)))
            for note in (*config.every_note(), *prompts.notes(config)):
                observer.note(note)
            _say_where(newest, observer, number)
            for reward, code in queries.scorers_at(recorder.ledger.connection, kept).items():
                if scored_by.get(reward) != code:  # other than code was refused
                    observer.note(
                        f"the code of reward {reward!r} changed since the checkpoint: its scores may not be "
                        "comparable with those before"
                    )
            undone = recorder.ledger.rollback(kept, number)
            recorder.ledger.record_scorers(scored_by)
            if queries.prompts_at(recorder.ledger.connection, kept) != prompts.ids:
                recorder.ledger.record_prompts(prompts.ids)
            # By what is still the old course.
            _record_estimate(config, directory, ranks, changed=bool(course))
            for said in recorder.ledger.record_course(kept, resume_at, course, began_s):
                observer.note(said)
            directory.adopt()
            if undone:
                observer.note(
                    f"{undone} ledger records after the checkpoint are undone and will be made again"
                )
            yield attempt
            assert attempt.result is not None, "an attempt that does not fail has a result"


def _record_estimate(config: RunConfig, directory: RunDirectory, ranks: Ranks, *, changed: bool) -> None:
    """Keep what the run is expected to take from before it begins, and again where its course changes."""
    if directory.estimate.exists() and not changed:
        return
    directory.estimate.unlink(missing_ok=True)  # of another course
    try:
        found = estimate_run(config, ranks.world)
    except Exception:  # no run shall end for it
        log.exception("no estimate")
        return
    if isinstance(found, str):
        log.info("an estimate needs %s", found)
        return
    write_estimate(directory.estimate, found)


def _require_same_scorers(before: Mapping[str, str], now: Mapping[str, str], directory: RunDirectory) -> None:
    for reward, scorer in before.items():
        if not same_scorer(scorer, now.get(reward, "")):
            found = f"by {now[reward]!r}" if reward in now else "by what it does not say"
            raise RewardSetupError(
                f"{directory.path}: reward {reward!r} was scored by {scorer!r} up to the checkpoint, and "
                f"would now be {found}; expected the same. Put back the weights that the run began with, "
                "or start a run of another name."
            )


def _open_recorder(
    stack: ExitStack,
    config: RunConfig,
    directory: RunDirectory,
    prompts: Prompts,
    ranks: Ranks,
    workers: Mapping[WorkerId, float],
    scored_by: Mapping[str, str],
    began_s: float,
    observer: Observer,
    keep_alive: Callable[[], None],
) -> tuple[RunRecorder, Checkpoint | None]:
    ledger = stack.enter_context(SqliteLedger(directory.ledger, observer.note, keep_alive))
    checkpoints = CheckpointStore(directory.checkpoints, config.checkpoint.keep)
    newest = checkpoints.newest_valid()
    require_resumable(ledger, newest, directory)
    resume_at, kept = (newest.header.iteration, newest.header.ledger_position) if newest else (0, 0)
    contents = files_read(config, prompts)
    require_same_files(newest.header.contents if newest else {}, contents, config)
    # Before the curves and pictures after the checkpoint are removed: a run that is refused keeps them.
    require_same_prompts(queries.prompts_at(ledger.connection, kept), prompts, config)
    # A fork may be scored otherwise than what it goes on from.
    if not any(change.key == "name" for change in read_course(ledger.connection, kept)):
        _require_same_scorers(queries.scorers_at(ledger.connection, kept), scored_by, directory)
    metrics = stack.enter_context(
        MetricsWriter(
            directory,
            resume_at=resume_at,
            sinks=open_sinks(config.metrics.chosen, directory, resume_at=resume_at),
        )
    )
    drop_pictures(directory, resume_at=resume_at)
    recorder = RunRecorder(
        paths=directory,
        ledger=ledger,
        checkpoints=checkpoints,
        metrics=metrics,
        ranks=ranks,
        workers=workers,
        prompts=prompts.by_id,
        header=CheckpointHeader(
            0,
            0,
            config_digest(config),
            spotlight.__version__,
            versions=library_versions(),
            contents=contents,
        ),
        strict=config.evaluation.strict,
        grid_images=config.evaluation.grid[1],
        fps=config.rollout.fps,
        kept=stack.enter_context(TrainingPictures(directory, metrics)),
        keeps_best=config.checkpoint.best,
        before_s=queries.worked_s(ledger.connection),
        began_s=began_s,
    )
    return recorder, newest


@contextmanager
def _closing(attempt: Attempt, account: Callable[[RunRecorder], None]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception):
            log.exception("the run failed")
        ending = Ending.STOPPED if isinstance(error, KeyboardInterrupt) else Ending.FAILED
        attempt.recorder.ledger.file.waits = False  # a second signal ends at once
        with suppress(StoreError):  # a full disk fails here too; the next attempt closes this one
            _close(attempt.recorder, account, ending)
        raise
    result = attempt.result
    assert result is not None
    ending = Ending.STOPPED if result.stopped else Ending.FAILED if result.error else Ending.FINISHED
    log.info("%s%s", ending.value, f": {result.error}" if result.error else "")
    _close(attempt.recorder, account, ending)


def _close(recorder: RunRecorder, account: Callable[[RunRecorder], None], ending: Ending) -> None:
    account(recorder)
    recorder.ledger.end_attempt(ending)


def _say_where(newest: Checkpoint | None, observer: Observer, attempt: int) -> None:
    if newest is None:
        if attempt > 1:
            observer.note(
                f"attempt {attempt}: no checkpoint was committed before, so this starts from the beginning"
            )
        return
    for damage in newest.damages:
        observer.note(f"damaged checkpoint passed over: {damage}")
    if note := version_note(newest.header, library_versions()):
        observer.note(note)
    observer.note(
        f"attempt {attempt}: resuming after iteration {newest.header.iteration} from {newest.directory}"
    )


def config_digest(config: RunConfig) -> str:
    """SHA-256 of the resolved configuration."""
    return hashlib.sha256(dump_config(config).encode()).hexdigest()


class _AttemptLog(logging.FileHandler):
    """Stops writing silently when the disk is full, so that the run's own error is the one reported."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _attempt_log(path: Path) -> Iterator[None]:
    with storage_errors("cannot write the log", path):
        open_to_append(path).close()
        handler = _AttemptLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(min(level, logging.INFO))  # not by attribute: loggers remember what is enabled
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


# -- the versions that a checkpoint was written with, and what others may do to the rest of a run ----------


_MAY_DIFFER = {
    "torch": "kernels, and with them the rounding of every forward and update",
    "diffusers": "the model's forward, and how its weights are read",
    "transformers": "text encoders, and with them the embeddings of prompts that are not in cache_dir",
    "spotlight-rl": "anything that CHANGELOG.md names",
}


def library_versions() -> dict[str, str]:
    """Of the libraries that a run's numbers come from."""
    return {name: version(name) for name in ("torch", "diffusers", "transformers")}


def version_note(then: CheckpointHeader, now: Mapping[str, str]) -> str | None:
    """What differs from the versions that a checkpoint names, of those that it does name."""
    named = {**then.versions, "spotlight-rl": then.package_version}
    current = {**now, "spotlight-rl": spotlight.__version__}
    changed = [
        f"{name} {named[name]} then, {current[name]} now ({may_differ} may differ)"
        for name, may_differ in _MAY_DIFFER.items()
        if name in named and named[name] != current[name]
    ]
    if not changed:
        return None
    return (
        f"other versions than those that wrote the checkpoint: {'; '.join(changed)}. The run goes on, but "
        "need not equal one that was not interrupted; for that, install the former versions"
    )


# -- whether a ledger and a run's checkpoints belong together, so that the run may go on from them ---------


def require_resumable(ledger: SqliteLedger, newest: Checkpoint | None, paths: RunPaths) -> None:
    """Read the whole ledger, and compare it with the checkpoint to resume from.

    Raises:
        LedgerError: it is damaged, or not the one that the checkpoint was written with.
        DamagedCheckpointError: checkpoints were committed, and there is none.
    """
    ledger.require_sound()
    if newest is None:
        if (committed := queries.furthest_checkpoint(ledger.connection)) is not None:
            raise DamagedCheckpointError(
                f"{paths.checkpoints}: no checkpoint is here, but by the ledger one was committed at record "
                f"{committed} of {ledger.position()}. Restore the folder from a copy, or delete the run "
                "directory to start again."
            )
        return
    position, expected = newest.header.ledger_position, newest.header.ledger_sha256
    if position > ledger.position():
        found = f"ends at record {ledger.position()}"
    elif expected and (digest := ledger.digest_at(position)) != expected:
        found = f"has the digest {digest} there, expected {expected}"
    else:
        return
    raise LedgerError(
        f"{paths.ledger}: not the ledger of {newest.directory.name}, which was written at record {position}: "
        f"it {found}. It is of another run, of another copy, or damaged: restore the ledger and the "
        "checkpoints from one copy of the run, or start a run of another name."
    )
