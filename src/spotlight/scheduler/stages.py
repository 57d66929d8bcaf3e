"""The stages of an iteration and the table of transitions between them.

``scripts/draw_stages.py`` renders the table as the diagram in ``docs/architecture.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """Where the current iteration stands."""

    IDLE = "idle"
    """The run has not begun."""
    STARTING = "starting"
    """Prompts and seeds are drawn, within one event."""
    PREPARING = "preparing"
    """A policy prepares the groups; evaluation rollouts may run beside its work."""
    ROLLING = "rolling"
    """Samples are generated and scored; with a pipeline axis, the learner already trains some."""
    REPORTING = "reporting"
    """All samples are there; the driver writes the evaluation."""
    LEARNING = "learning"
    """The learner trains what it has not trained yet."""
    PUBLISHING = "publishing"
    COMMITTING = "committing"
    OVER = "over"


class Trigger(StrEnum):
    """What ends a stage."""

    RUN_STARTED = "run started"
    ROLLOUTS_HELD_BACK = "rollouts held back"
    ROLLOUTS_ISSUED = "rollouts issued"
    GROUPS_DECIDED = "groups decided"
    SAMPLES_SCORED = "samples scored"
    """Every sample is scored or dropped; no evaluation is due."""
    EVALUATION_SCORED = "evaluation scored"
    """The same, with an evaluation."""
    EVALUATION_REPORTED = "evaluation reported"
    BATCH_FINISHED = "batch finished"
    WEIGHTS_PUBLISHED = "weights published"
    CHECKPOINT_DUE = "checkpoint due"
    """Weights are published, and a checkpoint ends the iteration."""
    CHECKPOINT_COMMITTED = "checkpoint committed"
    CHECKPOINT_BEGUN = "checkpoint begun"
    """The learner moves: it is committed behind the next iteration's rollouts."""
    LEARNER_LOST = "learner lost"
    ITERATIONS_DONE = "iterations done"
    """The last evaluation is reported; nothing is left to train."""
    RUN_STOPPED = "run stopped"
    """By an error the user has to fix, or on request."""
    SAVED_EARLY = "saved early"
    """On request, or for want of scores, before the iteration's first update: what was there when it began is
    saved."""


_INTERRUPTED = {Trigger.LEARNER_LOST: Stage.STARTING, Trigger.RUN_STOPPED: Stage.OVER}

TRANSITIONS: Mapping[Stage, Mapping[Trigger, Stage]] = {
    Stage.IDLE: {
        Trigger.RUN_STARTED: Stage.STARTING,
        Trigger.RUN_STOPPED: Stage.OVER,
    },
    Stage.STARTING: {
        Trigger.ROLLOUTS_HELD_BACK: Stage.PREPARING,
        Trigger.ROLLOUTS_ISSUED: Stage.ROLLING,
    },
    Stage.PREPARING: {
        Trigger.GROUPS_DECIDED: Stage.ROLLING,
        **_INTERRUPTED,
        Trigger.SAVED_EARLY: Stage.COMMITTING,
    },
    Stage.ROLLING: {
        Trigger.SAMPLES_SCORED: Stage.LEARNING,
        Trigger.EVALUATION_SCORED: Stage.REPORTING,
        **_INTERRUPTED,
        Trigger.SAVED_EARLY: Stage.COMMITTING,
    },
    Stage.REPORTING: {
        Trigger.EVALUATION_REPORTED: Stage.LEARNING,
        **_INTERRUPTED,
        Trigger.SAVED_EARLY: Stage.COMMITTING,
    },
    Stage.LEARNING: {
        Trigger.BATCH_FINISHED: Stage.PUBLISHING,
        Trigger.ITERATIONS_DONE: Stage.OVER,
        **_INTERRUPTED,
        Trigger.SAVED_EARLY: Stage.COMMITTING,
    },
    Stage.PUBLISHING: {
        Trigger.WEIGHTS_PUBLISHED: Stage.STARTING,
        Trigger.CHECKPOINT_DUE: Stage.COMMITTING,
        **_INTERRUPTED,
    },
    Stage.COMMITTING: {
        Trigger.CHECKPOINT_COMMITTED: Stage.STARTING,
        Trigger.CHECKPOINT_BEGUN: Stage.STARTING,
        **_INTERRUPTED,
    },
    Stage.OVER: {},
}

GENERATING = frozenset({Stage.ROLLING, Stage.REPORTING})
"""Stages in which the learner may train parts of the batch before it is complete."""

LEARNER_IDLES = frozenset({Stage.IDLE, Stage.PREPARING, Stage.ROLLING, Stage.REPORTING})
"""Stages in which the learner's GPUs may generate while nothing is trainable."""

LOOKS_AHEAD = frozenset({Stage.ROLLING, Stage.REPORTING, Stage.LEARNING, Stage.PUBLISHING})
"""Stages in which policies may give idle workers work for the next iteration."""


class IllegalTransitionError(RuntimeError):
    """The stage does not allow this event: a bug of the driver or controller."""


@dataclass(slots=True)
class StageMachine:
    """The one place where the stage changes."""

    stage: Stage = Stage.IDLE

    def move(self, trigger: Trigger) -> None:
        """Follow :data:`TRANSITIONS`. Raises :class:`IllegalTransitionError` if it has no entry."""
        following = TRANSITIONS[self.stage].get(trigger)
        if following is None:
            known = ", ".join(TRANSITIONS[self.stage]) or "nothing"
            raise IllegalTransitionError(
                f"{trigger!r} in stage {self.stage.value!r}, which only {known} can end; "
                "drivers answer effects in order"
            )
        self.stage = following
