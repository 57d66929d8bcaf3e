"""Denoises the rollouts of a lease in this process, and keeps previews that have paused.

Previews pause at the rungs of successive halving. Invariant: every rank holds the state of every paused
rollout, since any of them may be given the next part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from spotlight.models.condition import Condition
from spotlight.models.slots import Slot, WeightSlots
from spotlight.rollout.engine import Engine
from spotlight.rollout.serialization import pack_state, unpack_state
from spotlight.rollout.state import FailedRollout, FinishedRollout, RolloutState
from spotlight.runtime.assembly.components import Recipes
from spotlight.scheduler.types import PromptId, Purpose, Rollout, RolloutId
from spotlight.training.batching.conditions import Conditions
from spotlight.training.sharding import Ranks


@dataclass(slots=True)
class PausedRollouts:
    """States of paused rollouts. See the module's docstring."""

    _states: dict[RolloutId, RolloutState] = field(default_factory=dict)

    def of(self, rollouts: Iterable[Rollout]) -> dict[RolloutId, RolloutState]:
        """The states from which those of these rollouts go on that have paused."""
        return {
            rollout.id: dataclasses.replace(self._states[rollout.id], rollout=rollout)
            for rollout in rollouts
            if rollout.id in self._states
        }

    def legs(self, rollouts: Sequence[Rollout]) -> list[tuple[Rollout, ...]]:
        """The rollouts of a lease by the steps they have to take: ranks run equally many forwards of each."""
        found: dict[tuple[int, int], list[Rollout]] = {}
        for rollout in rollouts:
            # Not from where the controller has it: one that failed since begins again.
            state = self._states.get(rollout.id)
            found.setdefault((0 if state is None else state.step, rollout.until), []).append(rollout)
        return [tuple(leg) for leg in found.values()]

    def keep(self, states: Iterable[RolloutState]) -> None:
        """Keep those that have paused; those that ended are let go."""
        for state in states:
            if state.rollout.pause is None:
                self._states.pop(state.rollout.id, None)
            else:
                self._states[state.rollout.id] = state

    def share(
        self,
        ranks: Ranks,
        mine: Sequence[Rollout],
        made: Sequence[Rollout],
        conditions: Callable[[Iterable[PromptId]], list[Condition]],
        device: torch.device,
    ) -> None:
        """Give the other ranks the states of ``mine``, and take theirs; let go of those that have ended.

        Args:
            made: by all ranks.
            conditions: of prompts, which every rank has: they are not sent.
        """
        if ranks.world == 1:
            return
        self.forget(rollout.id for rollout in made if rollout.pause is None)
        paused = [self._states[rollout.id] for rollout in mine if rollout.pause is not None]
        bare = [dataclasses.replace(state, condition=Condition({})) for state in paused]
        by_rank = ranks.share([(state.recipe, pack_state(state)) for state in bare])
        others = [one for rank, theirs in enumerate(by_rank) if rank != ranks.rank for one in theirs]
        states = [unpack_state(packed, recipe, device) for recipe, packed in others]
        prompts = list(dict.fromkeys(state.rollout.prompt_id for state in states))
        embeddings = [condition.to(device) for condition in conditions(prompts)]
        known = dict(zip(prompts, embeddings, strict=True))
        self.keep(dataclasses.replace(state, condition=known[state.rollout.prompt_id]) for state in states)

    def forget(self, rollouts: Iterable[RolloutId]) -> None:
        """Let go of discarded rollouts."""
        for rollout in rollouts:
            self._states.pop(rollout, None)


@dataclass(frozen=True, slots=True)
class Denoiser:
    """Runs leases with their purpose's slot; previews use ``train_slot`` (the behaviour policy).

    Attributes:
        around: a context for the steps of a lease, given the module that takes them.
    """

    engine: Engine
    slots: WeightSlots
    conditions: Conditions
    recipes: Recipes
    train_slot: Slot
    evaluation_slot: Slot
    around: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext

    def run(
        self,
        rollouts: Sequence[Rollout],
        on_step: Callable[[float], None],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        paused: PausedRollouts | None = None,
    ) -> list[FinishedRollout | FailedRollout]:
        """Denoise rollouts of one purpose; calls ``on_step(fraction_done)`` after every step.

        Args:
            around: a context for each step.
            paused: where rollouts go on from, and where those that pause are kept.
        """
        evaluating = rollouts[0].purpose is Purpose.EVAL
        recipe = self.recipes.by_purpose()[rollouts[0].purpose]
        begun = {} if paused is None else paused.of(rollouts)
        fresh = [rollout for rollout in rollouts if rollout.id not in begun]
        conditions = self.conditions.of(rollout.prompt_id for rollout in fresh)
        begun |= {state.rollout.id: state for state in self.engine.start(fresh, conditions, recipe)}
        states = [begun[rollout.id] for rollout in rollouts]
        steps = max(state.rollout.until - state.step for state in states)
        slot = self.evaluation_slot if evaluating else self.train_slot
        # Autocast would round merged weights to half precision; an unmerged adapter keeps its contribution.
        with self.slots.use(slot, merged=self.engine.autocast is None) as model, self.around(model):
            for step in range(steps):
                with around():
                    states = self.engine.step(model, states)
                on_step((step + 1) / steps)
        if paused is not None:
            paused.keep(states)
        return self.engine.finish(states)
