"""Parts of the batch are trained while the rest is generated: whole groups, or slices of groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from spotlight.config.section import Section
from spotlight.scheduler.batches import Part
from spotlight.scheduler.policies.overlap.slices import slices
from spotlight.scheduler.policy import Policy, Training
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.types import RolloutId, Scores


class Overlap(Policy):
    """See the module's docstring."""

    def __init__(self, work: Rollouts, settings: Section | None) -> None:
        self.work = work

    @property
    def trains_parts(self) -> bool:
        """See :class:`Policy`."""
        return True

    def parts(self, slot: int, members: Sequence[RolloutId]) -> Iterator[Part]:
        """See :class:`Policy`."""
        current, work = self.work.current, self.work
        return slices(
            work.plan.pipeline,
            slot,
            current.rollouts[members[0]].prompt_id,
            members,
            current.scores,
            lambda rollout: rollout not in current.unscored,
            partial(self._others, slot),
        )

    def _others(self, slot: int, members: Sequence[RolloutId]) -> list[Scores]:
        return [scores for each in self.work.policies.values() for scores in each.others(slot, members)]

    def figures(self, training: Training) -> dict[str, int]:
        """See :class:`Policy`."""
        return {"overlapped_samples": training.overlapped}
