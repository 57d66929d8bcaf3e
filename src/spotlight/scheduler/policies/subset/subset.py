"""What of the scored samples is trained: some of each group, and no groups without a signal.

Invariant: of a whole group ``Plan.choice.samples`` are trained, or all that were scored if those are fewer.

The choice depends on the rewards, the seeds and the run seed alone, never on arrival: a resumed run, every
driver and every rank choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from spotlight.config.section import Section
from spotlight.config.sections.algorithm import TrainPolicy
from spotlight.scheduler.batches import Part
from spotlight.scheduler.effects import ReportChoice
from spotlight.scheduler.policies.selection import SelectionPolicy, select
from spotlight.scheduler.policy import Policy, Training
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import Baseline, Comparison, DropReason


class Subset(Policy):
    """See the module's docstring."""

    def __init__(self, work: Rollouts, settings: Section | None) -> None:
        self.work = work

    def select(self, part: Part, iteration: int) -> Part:
        """See :class:`Policy`."""
        plan, current, choice = self.work.plan, self.work.current, self.work.plan.choice
        names = part.group.rollouts
        if choice.samples is None or len(names) <= choice.samples:
            return part
        rewards = {current.rollouts[name].seed: current.scores[name][REWARD] for name in names}
        draw_seed = derive_seed(plan.run_seed, "subset", iteration, part.slot)
        seeds = choose_seeds(rewards, choice.samples, choice.policy, draw_seed)
        left_out = tuple(name for name in names if current.rollouts[name].seed not in seeds)
        others = tuple(current.scores[name] for name in left_out) if choice.over == "generated" else ()
        chosen = part.without({*left_out})
        return replace(chosen, comparison=Comparison(Baseline.GROUP, others), left_out=left_out)

    def defers(self, part: Part) -> bool:
        """What becomes of a silent group is known when all others are."""
        return self.work.plan.choice.silent_groups != "train" and self._is_silent(part)

    def _is_silent(self, part: Part) -> bool:
        """Whether all advantages are 0."""
        rewards = {self.work.current.scores[name][REWARD] for name in part.group.rollouts}
        return part.comparison.baseline is Baseline.GROUP and len(rewards) == 1

    def left_out(self, updates: list[list[Part]], training: Training) -> list[list[Part]]:
        """The updates without silent groups, except for the samples that make ranks share evenly.

        An update that has nothing else to train stays as it is, so that no optimizer step is missing.
        """
        plan = self.work.plan
        if plan.choice.silent_groups == "train":
            return updates
        # Ranks cannot share a whole group with fewer samples, which is left out.
        smallest = plan.ranks if plan.whole_groups else 1
        kept: list[list[Part]] = []
        for update, found in enumerate(updates):
            silent = [part for part in found if self._is_silent(part)]
            differing = [part for part in found if not self._is_silent(part)]
            trains = any(len(part.group.rollouts) >= smallest for part in differing)
            if not (trains or training.has_begun(update)):
                kept.append(found)
                continue
            spare = [name for part in silent for name in part.group.rollouts]
            short = -sum(len(part.group.rollouts) for part in differing) % plan.ranks
            short = 0 if plan.whole_groups else short  # samples of a cut group cannot be compared
            skipped = spare[short if short <= len(spare) else 0 :]
            if plan.choice.silent_groups == "as_zero":
                training.zeros[update] += len(skipped)
            training.leave_out([skipped], DropReason.SILENT_GROUP)
            kept.append(differing + training.trained(part.without({*skipped}) for part in silent))
        return kept

    def reports(self, training: Training) -> Iterator[ReportChoice]:
        """What was trained and left out."""
        trained, left_out = sum(map(len, training.trained_in.values())), training.left_out
        not_chosen, silent = left_out[DropReason.NOT_CHOSEN], left_out[DropReason.SILENT_GROUP]
        yield ReportChoice(training.iteration, trained, not_chosen, silent)


# -- which samples of a whole group are trained. Pure ------------------------------------------------------


def choose_seeds(
    rewards: Mapping[int, float], count: int, policy: TrainPolicy, draw_seed: int
) -> frozenset[int]:
    """``count`` seeds, or all if there are no more. Equal rewards rank by seed; seeds are hashes.

    Of a group whose rewards differ, every policy but ``random`` chooses rewards that differ.

    Args:
        rewards: by seed.
        count: at least 2.
        draw_seed: fixes what is random.
    """
    if len(rewards) <= count:
        return frozenset(rewards)
    if policy == "farthest":
        return frozenset(_farthest(rewards, count))
    found = select(rewards, count, SelectionPolicy(policy), draw_seed=draw_seed, draw_flat=True)
    return frozenset(found.seeds)


def _farthest(rewards: Mapping[int, float], count: int) -> list[int]:
    """Those farthest from the mean, from both its sides: their advantages are relative to their own mean."""
    mean = math.fsum(rewards.values()) / len(rewards)
    ranked = sorted(rewards, key=lambda seed: (-abs(rewards[seed] - mean), seed))
    chosen = ranked[:count]
    low = min(ranked, key=lambda seed: (rewards[seed], seed))
    high = min(ranked, key=lambda seed: (-rewards[seed], seed))
    # Where rounding makes the mean an extreme, a side seems empty although that extreme is chosen.
    if all(rewards[seed] >= mean for seed in chosen) and low not in chosen:
        chosen[-1] = low
    elif all(rewards[seed] <= mean for seed in chosen) and high not in chosen:
        chosen[-1] = high
    return chosen
