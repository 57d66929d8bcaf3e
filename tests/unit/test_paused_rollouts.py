"""Paused previews in one process, and among ranks that share their forwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import torch

from spotlight.diffusion.samplers import ODE
from spotlight.models.condition import Condition
from spotlight.models.media import MediaSize
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.runtime.denoiser import PausedRollouts
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.prompts import PromptId

T = TypeVar("T")
RECIPE = Recipe(MediaSize(16, 16), ODE(), None, 1.0, "final")


def preview(name: str, pause: int | None) -> Rollout:
    return Rollout(
        RolloutId(name), Purpose.EXPLORE, 0, PromptId("p"), 0, len(name), 10, PolicyVersion(0), pause
    )


def paused(name: str, pause: int) -> RolloutState:
    values = torch.full((4, 2), float(len(name)))
    condition = Condition({"embeds": torch.ones(3, 2), "mask": torch.ones(3)})
    sigmas = torch.linspace(1, 0, 11)
    return RolloutState(
        preview(name, pause), RECIPE, condition, pause, values, sigmas, range(0), predicted=values + 1
    )


def test_a_lease_is_made_in_legs_of_equal_length() -> None:
    fresh, again, last = preview("a", 4), preview("b", 7), preview("c", None)
    held = PausedRollouts()
    held.keep([paused("b", 4), paused("c", 7)])
    assert held.legs([fresh, again, last, preview("d", 4)]) == [
        (fresh, preview("d", 4)),
        (again,),
        (last,),
    ]


def test_a_rollout_goes_on_from_where_it_paused_until_it_ends_or_is_let_go() -> None:
    held = PausedRollouts()
    held.keep([paused("a", 4), paused("bb", 4)])
    onwards = preview("a", 7)
    (state,) = held.of([onwards, preview("c", 4)]).values()
    assert (state.rollout, state.step) == (onwards, 4)
    ended = dataclasses.replace(state, rollout=preview("a", None), step=10)
    held.keep([ended])
    held.forget([RolloutId("bb")])
    assert held.of([onwards, preview("bb", 7)]) == {}


class Both(Ranks):
    """One of two ranks, which gets what was shared before."""

    shared: ClassVar[list[Any]] = []

    def share(self, value: T) -> list[T]:
        self.shared.append(value)
        return list(self.shared)


def conditions(prompts: Iterable[PromptId]) -> list[Condition]:
    return [Condition({"embeds": torch.full((3, 2), 5.0)}) for _ in prompts]


def test_every_rank_can_go_on_with_what_any_has_made() -> None:
    Both.shared.clear()
    both = [preview("bb", 4), preview("a", 4)]
    for rank, name in enumerate(("bb", "a")):
        held = PausedRollouts()
        held.keep([paused(name, 4)])
        held.share(Both(rank, 2), [preview(name, 4)], both, conditions, torch.device("cpu"))
    found = held.of([preview("a", 7), preview("bb", 7)])
    assert {name: float(state.latents.mean()) for name, state in found.items()} == {"a": 1.0, "bb": 2.0}
    assert found[RolloutId("bb")].rollout.pause == 7
    assert torch.equal(found[RolloutId("bb")].condition["embeds"], torch.full((3, 2), 5.0))
    assert Both.shared[0][0][1].find(b"condition") < 0, "every rank has the prompts' embeddings"
    Both.shared.clear()
    ended = [preview("a", None)]  # on the other rank
    held.share(Both(1, 2), [], ended, conditions, torch.device("cpu"))
    assert list(held.of([preview("a", 7), preview("bb", 7)])) == ["bb"]
