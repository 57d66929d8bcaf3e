"""Divide surviving groups into optimizer steps and micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from spotlight.scheduler.types import Comparison, Group, MicroBatch, RolloutId, Scores
from spotlight_rewards.base.prompts import PromptId

GroupLike = TypeVar("GroupLike")


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one group that can be trained now.

    Attributes:
        slot: of the group.
        members: number of leading members in parts so far, this one included.
        left_out: scored members that are not to be trained.
    """

    slot: int
    members: int
    group: Group
    comparison: Comparison
    left_out: tuple[RolloutId, ...] = ()

    def without(self, samples: set[RolloutId]) -> Part:
        """The same with fewer samples."""
        kept = tuple(rollout for rollout in self.group.rollouts if rollout not in samples)
        return replace(self, group=Group(self.group.prompt_id, kept))


def whole_group(
    slot: int,
    prompt: PromptId,
    members: Sequence[RolloutId],
    scores: Mapping[RolloutId, Scores],
    unscored: Set[RolloutId],
) -> Iterator[Part]:
    """The group as one part, once no member is ``unscored`` and two can be compared."""
    if unscored.isdisjoint(members):
        scored = tuple(member for member in members if member in scores)
        if len(scored) >= 2:
            yield Part(slot, len(members), Group(prompt, scored), Comparison())


def even_shares(total: int, most: int) -> list[range]:
    """So many things, in order and evenly in at most ``most`` parts; of none there is one, empty."""
    count = max(1, min(most, total))
    return [range(low, high) for low, high in pairwise(total * index // count for index in range(count + 1))]


def split_updates(groups: Sequence[GroupLike], updates: int) -> list[list[GroupLike]]:
    """Divide whole groups, or what stands for each, among at most ``updates`` optimizer steps."""
    shares = even_shares(len(groups), updates)
    return [[groups[index] for index in share] for share in shares if share]


def split_samples(
    groups: Sequence[Group], updates: int, ranks: int, key: Callable[[RolloutId], int] | None
) -> list[list[Group]]:
    """Divide samples among at most ``updates`` optimizer steps, as evenly as the ``ranks`` allow.

    Args:
        groups: with a number of samples divisible by ``ranks``.
        key: puts samples in order; None: each step takes an equal part of every group.

    Returns:
        The parts of groups in each step, whose number of samples is divisible by ``ranks``.
    """
    place = {
        name: key(name) if key is not None else member / len(group.rollouts)
        for group in groups
        for member, name in enumerate(group.rollouts)
    }
    order = sorted(place, key=place.__getitem__)
    shares = even_shares(len(order) // ranks, updates)
    return [_parts(groups, {*order[share.start * ranks : share.stop * ranks]}) for share in shares]


def _parts(groups: Sequence[Group], samples: set[RolloutId]) -> list[Group]:
    parts = (Group(group.prompt_id, tuple(filter(samples.__contains__, group.rollouts))) for group in groups)
    return [part for part in parts if part.rollouts]


def even_out(groups: Sequence[Group], ranks: int) -> list[RolloutId]:
    """Samples to leave out, so that the total is divisible by ``ranks``; perhaps all.

    The largest group loses its last sample first; a group of two goes entirely, as a lone sample has nothing
    to be compared with.
    """
    kept = [list(group.rollouts) for group in groups]
    surplus: list[RolloutId] = []
    while sum(map(len, kept)) % ranks:
        largest = max(range(len(kept)), key=lambda index: (len(kept[index]), index))
        cut = 1 if len(kept[largest]) > 2 else len(kept[largest])
        surplus += kept[largest][-cut:]
        del kept[largest][-cut:]
    return surplus


def even_out_each(groups: Sequence[Group], ranks: int) -> list[RolloutId]:
    """As :func:`even_out`, but every group is divisible by ``ranks``, so that any of them are."""
    return [lost for group in groups for lost in even_out([group], ranks)]


def micro_batches(
    groups: Sequence[Group],
    iteration: int,
    update: int,
    size: int,
    update_samples: int,
    *,
    whole_groups: bool,
) -> list[MicroBatch]:
    """Cut an optimizer step's samples, in group order, into micro-batches of at most ``size``.

    Args:
        update_samples: of the whole step.
        whole_groups: cut between groups only.
    """
    samples = [rollout for group in groups for rollout in group.rollouts]
    pieces = [group.rollouts for group in groups] if whole_groups else [(sample,) for sample in samples]
    found: list[list[RolloutId]] = []
    for piece in pieces:
        if not found or len(found[-1]) + len(piece) > size:
            found.append([])
        found[-1] += piece
    return [MicroBatch(iteration, update, tuple(rollouts), update_samples) for rollouts in found]
