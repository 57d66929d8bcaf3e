"""What a worker holds under which lease, and how many steps of it are safe."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight.diffusion.samplers import ODE
from spotlight.models.condition import Condition
from spotlight.models.media import MediaSize
from spotlight.rollout.sequence_parallel.lockstep import Claim
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.scheduler.types import LeaseId, PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.worker.leases import Leases, safe_steps
from spotlight_rewards.base.prompts import PromptId

RECIPE = Recipe(MediaSize(4, 4), ODE(), None, 1.0, "final")
STEPS = 9


def state(name: str, step: int = 0) -> RolloutState:
    rollout = Rollout(RolloutId(name), Purpose.TRAIN, 0, PromptId("p"), 0, 0, STEPS, PolicyVersion(0))
    empty = torch.empty(0)
    return RolloutState(rollout, RECIPE, Condition({"embeds": empty}), step, empty, empty, range(0))


def advance(held: Leases, every: int = 1) -> list[LeaseId]:
    held.advance([dataclasses.replace(s, step=s.step + 1) for s in held.states])
    return held.step_taken(every)


def test_a_rollout_is_held_under_the_lease_granted_last() -> None:
    held = Leases()
    held.add(LeaseId(1), [state("a"), state("b")], {})
    held.add(LeaseId(2), [state("b", 3)], {RolloutId("b"): 2})
    assert held.ids == (1, 2)
    assert held.claims == {"a": Claim(LeaseId(1), 0), "b": Claim(LeaseId(2), 2)}
    held.add(LeaseId(3), [state("a")], {})
    assert held.ids == (2, 3)  # nothing is left of the first
    assert held.of_lease(LeaseId(1)) == ()


def test_leases_are_committed_by_their_own_count() -> None:
    held = Leases()
    held.add(LeaseId(1), [state("a")], {})
    assert advance(held, 3) == []
    held.add(LeaseId(2), [state("b")], {})
    assert [advance(held, 3) for _ in range(5)] == [[], [1], [2], [], [1]]


@given(
    st.lists(st.tuples(st.integers(0, STEPS), st.integers(0, STEPS)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_no_more_is_reported_than_is_safe_of_each(members: list[tuple[int, int]], taken: int) -> None:
    """(step it is at, step it is believed to have begun at) of each."""
    held = Leases()
    states = [state(f"r{i}", at) for i, (at, _) in enumerate(members)]
    held.add(LeaseId(1), states, {RolloutId(f"r{i}"): began for i, (_, began) in enumerate(members)})
    for _ in range(taken):
        advance(held)
    steps = safe_steps(held.states, held.claims)[LeaseId(1)]
    at = {s.rollout.id: s.step for s in held.states}
    believed = {name: claim.began + steps for name, claim in held.claims.items()}
    assert all(believed[name] <= at[name] for name in at)
    assert any(believed[name] == at[name] for name in at)
    assert held.news(LeaseId(1), steps) == (steps > 0)
    assert not held.news(LeaseId(1), steps)


def test_empty_leases_are_not_held() -> None:
    held = Leases(seen=LeaseId(4))
    held.add(LeaseId(4), [], {})
    assert held.ids == ()
    held.add(LeaseId(5), [state("a"), state("b")], {})
    assert held.remove(RolloutId("a")) == held.remove(RolloutId("b")) == 5
    assert (held.ids, len(held)) == ((), 0)
    held.add(LeaseId(6), [state("c")], {})
    held.drop(LeaseId(5))
    held.drop(LeaseId(6))
    assert (held.ids, len(held)) == ((), 0)
    held.add(LeaseId(7), [state("d")], {})
    held.let_go()
    assert (held.ids, len(held), held.seen) == ((), 0, 4)
