"""Parts of the batch are trained while the rest is generated: whole groups, or slices of groups.

On the axis ``prompt`` a group is one slice. On the axis ``generation`` a group is cut by member index, not by
arrival: comparisons depend on who was scored or dropped, never on timing, so equal samples give equal
advantages in every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial

from spotlight.config.section import Section
from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.scheduler.batches import Part, whole_group
from spotlight.scheduler.policy import Policy, Training
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.types import COMPARED_MIN, Baseline, Comparison, Group, RolloutId, Scores
from spotlight_rewards.base.prompts import PromptId


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
            current.unscored,
            partial(self._others, slot),
        )

    def _others(self, slot: int, members: Sequence[RolloutId]) -> list[Scores]:
        return [scores for each in self.work.policies.values() for scores in each.others(slot, members)]

    def figures(self, training: Training) -> dict[str, int]:
        """See :class:`Policy`."""
        return {"overlapped_samples": training.overlapped}


# -- which samples of an incomplete batch can be trained, and what they are compared with. Pure ------------


def slices(
    pipeline: PipelineConfig,
    slot: int,
    prompt: PromptId,
    members: Sequence[RolloutId],
    scores: Mapping[RolloutId, Scores],
    unscored: Set[RolloutId],
    explored: Callable[[Sequence[RolloutId]], Sequence[Scores]],
) -> Iterator[Part]:
    """The slices of a group that are complete, in order.

    Args:
        unscored: members neither scored nor dropped yet.
        explored: preview scores of the prompt at seeds other than those of the given members.
    """
    baseline = Baseline(pipeline.baseline) if pipeline.axis == "generation" else Baseline.GROUP
    if baseline is Baseline.EXPLORATION and len(explored(members[: pipeline.slice_size])) < COMPARED_MIN:
        baseline = Baseline.GROUP
    if baseline is Baseline.GROUP:
        yield from whole_group(slot, prompt, members, scores, unscored)
        return
    seen: list[RolloutId] = []
    arrived: list[RolloutId] = []
    sliced = 0
    for start in range(0, len(members), pipeline.slice_size):
        chunk = members[start : start + pipeline.slice_size]
        if not unscored.isdisjoint(chunk):
            return
        sliced += len(chunk)
        arrived += [member for member in chunk if member in scores]
        if baseline is Baseline.EXPLORATION:
            comparison = Comparison(baseline, tuple(explored(chunk)))
        elif len(seen) + len(arrived) - 1 >= COMPARED_MIN:
            comparison = Comparison(baseline, tuple(scores[member] for member in seen))
        else:
            continue  # too few survived to be compared: merged into the next slice
        if arrived:
            yield Part(slot, sliced, Group(prompt, tuple(arrived)), comparison)
            seen += arrived
            arrived = []
