"""Write a run's records, GPU-seconds, metrics, images and checkpoints. Only the main rank writes.

Order on disk: records before the seconds they cost, both before the checkpoint that counts them, so a
checkpoint is never ahead of the ledger.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spotlight.data.datasets import Prompts
from spotlight.runtime.validation import Validation, summarise
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import CommitCheckpoint, GrantLease, ReportEvaluation, ReportPipeline
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.records import REWARD, Record
from spotlight.scheduler.types import Phase, Rollout, RolloutId, WorkerId
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.images import Tile, write_grid
from spotlight.store.ledger.sqlite_ledger import GpuSpend, GrantedLease, SqliteLedger
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.metrics import VALIDATION, MetricsRow, MetricsWriter, best_iterations, read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight.store.training_pictures import TrainingPictures, best_and_worst, training_tile
from spotlight.training.learner import Learner
from spotlight.training.learner_state import StateError
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.picture_page import picture_of
from spotlight_rewards.base.prompts import Prompt, PromptId

CONTROLLER_FILE, LEARNER_FOLDER = "controller.json", "learner"
Picture = NDArray[np.uint8]


@dataclass(slots=True)
class Recorder:
    """What a driver records: a rank that is not the main one only takes part in what is collective."""

    ranks: Ranks
    prompts: Mapping[PromptId, Prompt]
    strict: str | None

    def write(self, position: int, record: Record) -> None:
        """Add a record; durable with the next bill."""

    def grant(self, effect: GrantLease) -> None:
        """Add who works on which rollouts; durable with the next bill."""

    def spend(self, seconds: Mapping[Phase, float]) -> None:
        """Bill an interval of every worker's time."""

    def evaluation(
        self, effect: ReportEvaluation, samples_trained: int, pictures: Mapping[Rollout, Picture | None]
    ) -> dict[str, float]:
        """Write validation scores and images; returns the metrics row.

        Args:
            pictures: by rollout of the grid, in its order; None: not scored.
        """
        return summarise(effect.scored, effect.scores, self.prompts, self.strict).row()

    def training(
        self,
        iteration: int,
        shown: Mapping[Rollout, Mapping[str, float]],
        pictures: Mapping[RolloutId, Picture],
    ) -> None:
        """Begin to keep pictures of training groups.

        Args:
            shown: scores by rollout, as :func:`shown_in_step` says.
        """

    def pipeline(self, effect: ReportPipeline) -> None:
        """Record work that filled otherwise idle GPU time."""

    def iteration(self, iteration: int, samples_trained: int, row: Mapping[str, float]) -> None:
        """Write an iteration's metrics."""

    def checkpoint(self, effect: CommitCheckpoint, learner: Learner) -> None:
        """Commit learner, controller and ledger position together. Collective."""
        _save_learner(learner, None, self.ranks)

    def committed(self, effect: CommitCheckpoint) -> None:
        """Record that a checkpoint is committed: without one the run does not start over."""


@dataclass(slots=True)
class RunRecorder(Recorder):
    """The main rank's recorder.

    Attributes:
        workers: USD per hour of each.
        before_s: seconds of work in earlier attempts.
        began_s: start of this one, in seconds since the epoch.
        grid_images: images per prompt shown.
        fps: of videos.
        kept: pictures of training groups.
        keeps_best: ``checkpoint.best``.
    """

    paths: RunPaths
    ledger: SqliteLedger
    checkpoints: CheckpointStore
    metrics: MetricsWriter
    workers: Mapping[WorkerId, float]
    header: CheckpointHeader
    grid_images: int
    fps: float
    kept: TrainingPictures
    before_s: float
    began_s: float
    keeps_best: bool = True
    _records: list[tuple[int, Record]] = field(default_factory=list)
    _granted: list[GrantedLease] = field(default_factory=list)
    _spent_s: float = 0.0

    def write(self, position: int, record: Record) -> None:
        """See :class:`Recorder`."""
        self._records.append((position, record))

    def grant(self, effect: GrantLease) -> None:
        """See :class:`Recorder`."""
        self._granted.append(GrantedLease(effect.lease, effect.resume, time.time()))

    def flush(self) -> None:
        """Make the records and grants so far durable."""
        self.ledger.append(self._records, self._granted)
        self._records, self._granted = [], []

    def spend(self, seconds: Mapping[Phase, float]) -> None:
        """See :class:`Recorder`."""
        spends = [
            GpuSpend(worker, phase, spent, price)
            for worker, price in self.workers.items()
            for phase, spent in seconds.items()
        ]
        elapsed_s = sum(seconds.values())
        # Not the time of day, which may be set meanwhile: what is billed would not be what was accounted for.
        self.bill(spends, elapsed_s, self.began_s + self._spent_s + elapsed_s)

    def bill(self, spends: Sequence[GpuSpend], elapsed_s: float, now_s: float) -> None:
        """Bill GPU-seconds of workers that come and go, up to ``now_s`` since the epoch.

        Args:
            elapsed_s: since the previous billing.
        """
        self.flush()
        self.ledger.spend(spends, now_s)
        self._spent_s += elapsed_s

    @property
    def wall_s(self) -> float:
        """Seconds of work on the run, all attempts together."""
        return self.before_s + self._spent_s

    def evaluation(
        self, effect: ReportEvaluation, samples_trained: int, pictures: Mapping[Rollout, Picture | None]
    ) -> dict[str, float]:
        """See :class:`Recorder`."""
        self.kept.settle()
        validation = summarise(effect.scored, effect.scores, self.prompts, self.strict)
        row = validation.row()
        named = {f"{VALIDATION}{name}": value for name, value in row.items()}
        self.metrics.write(MetricsRow(effect.iteration, samples_trained, self.wall_s, named))
        self._draw(effect, pictures, validation)
        return row

    def training(
        self,
        iteration: int,
        shown: Mapping[Rollout, Mapping[str, float]],
        pictures: Mapping[RolloutId, Picture],
    ) -> None:
        """See :class:`Recorder`."""
        self.kept.keep(
            iteration,
            [
                training_tile(
                    pictures[rollout.id], self.prompts[rollout.prompt_id].text, rollout, scores, self.fps
                )
                if rollout.id in pictures
                else None
                for rollout, scores in shown.items()
            ],
        )

    def pipeline(self, effect: ReportPipeline) -> None:
        """See :class:`Recorder`."""
        self.flush()
        self.ledger.fill(effect.iteration, effect.filled_s)

    def iteration(self, iteration: int, samples_trained: int, row: Mapping[str, float]) -> None:
        """See :class:`Recorder`."""
        self.kept.settle(before=iteration)
        self.metrics.write(MetricsRow(iteration, samples_trained, self.wall_s, row))

    def checkpoint(self, effect: CommitCheckpoint, learner: Learner) -> None:
        """See :class:`Recorder`."""
        with self.committing(effect) as directory:
            _save_learner(learner, directory, self.ranks)

    def committed(self, effect: CommitCheckpoint) -> None:
        """See :class:`Recorder`."""
        self.ledger.record_checkpoint(effect.position, effect.iteration)

    @contextmanager
    def committing(self, effect: CommitCheckpoint) -> Iterator[Path]:
        """Yield a directory for the learner's state, :data:`LEARNER_FOLDER`; leaving the block, which any
        thread may do, commits everything. Call :meth:`committed` then."""
        self.flush()
        self.kept.settle()  # those of an iteration that is committed are not made again
        self.metrics.sync()
        header = replace(
            self.header,
            iteration=effect.iteration,
            ledger_position=effect.position,
            ledger_sha256=self.ledger.digest_at(effect.position),
        )
        best = best_iterations(read_metrics(self.paths.path)) if self.keeps_best else []
        with self.checkpoints.writer(header, best) as directory:
            (directory / CONTROLLER_FILE).write_text(json.dumps(effect.snapshot), encoding="utf-8")
            yield directory

    def undo(self, position: int, attempt: int, iteration: int) -> int:
        """Delete the records after ``position``, and metrics from ``iteration`` on.

        Returns the number of records that the ledger held.
        """
        self.kept.settle()
        self.metrics.rewind(iteration)
        self._records = [(number, record) for number, record in self._records if number <= position]
        self.flush()
        return self.ledger.rollback(position, attempt) if self.ledger.position() > position else 0

    def _draw(
        self, effect: ReportEvaluation, pictures: Mapping[Rollout, Picture | None], validation: Validation
    ) -> None:
        curve = validation.strict or REWARD
        tiles = [
            None
            if picture is None
            else Tile(
                picture,
                self.prompts[rollout.prompt_id].text,
                effect.scores[rollout.id][curve],
                self.fps,
                tuple(map(_reference, self.prompts[rollout.prompt_id].references)),
                rollout.member,
            )
            for rollout, picture in pictures.items()
        ]
        title = f"iteration {effect.iteration}: {curve} {validation.judged.mean:.3f}"
        if any(tiles):  # none of the grid's samples may have been scored
            write_grid(self.paths, effect.iteration, tiles, columns=self.grid_images, title=title)
            self.metrics.pictures(effect.iteration)


def _reference(path: str) -> Picture:
    try:
        return picture_of(path)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"reference picture {path} cannot be read any more ({error}). Put it back."
        ) from error


def _save_learner(learner: Learner, directory: Path | None, ranks: Ranks) -> None:
    (chosen, *_) = ranks.share(str(directory) if directory else "")
    learner.save(Path(chosen) / LEARNER_FOLDER)


def shown_in_step(controller: Controller, every: int) -> dict[Rollout, Mapping[str, float]]:
    """What to keep of an iteration whose optimizer is about to step, with its scores; best, worst, best, ...

    Empty after the first step, and in all iterations but each ``every``-th and the last one. What is stored
    at the first step is what is trained, whichever policies left samples out or trained parts early.
    """
    iteration, training, current = controller.iteration, controller.training, controller.work.current
    due = every > 0 and (iteration % every == 0 or iteration == controller.plan.iterations - 1)
    if not due or len(training.trained_in) > 1:
        return {}
    kept = current.makers.keys() & current.scores.keys()
    groups = [[name for name in members if name in kept] for members in current.groups.values()]
    pairs = best_and_worst(groups, {name: current.scores[name][REWARD] for name in kept})
    return {current.rollouts[name]: current.scores[name] for pair in pairs for name in pair}


def shown(rollouts: Sequence[Rollout], prompts: int, images: int) -> list[Rollout]:
    """Rollouts shown in grids, of all that were issued: the first ``images`` of evenly spaced prompts."""
    met = list(dict.fromkeys(rollout.prompt_id for rollout in rollouts))
    count = min(prompts, len(met))
    chosen = {met[index * len(met) // count] for index in range(count)}
    return [rollout for rollout in rollouts if rollout.prompt_id in chosen and rollout.member < images]


def restored_controller(checkpoint: Path, plan: Plan, prompts: Prompts, term: int = 0) -> Controller:
    """The controller that a checkpoint's directory holds; see :meth:`Controller.restore`.

    Raises:
        StateError: the file is missing, damaged or of another version.
    """
    path = checkpoint / CONTROLLER_FILE
    try:
        snapshot = json.loads(path.read_text(encoding="utf-8"))
        return Controller.restore(plan, prompts.train, prompts.test, snapshot, term)
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(
            f"{path} cannot be read ({error}): it is damaged, or of another version. Use the version that "
            "made it (package_version in the checkpoint's manifest.json), or start a run of another name."
        ) from error
