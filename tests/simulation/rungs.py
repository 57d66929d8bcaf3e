"""Previews that stop early: the middle of their prompt's rewards, and no more than was planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from spotlight.scheduler.exploration.halving import rungs_of
from spotlight.scheduler.records import SampleDropped
from spotlight.scheduler.types import Purpose, Rollout, RolloutId
from spotlight_plan.simulation.scenario import Scenario


def check_stopped(
    scenario: Scenario,
    stopped: Collection[SampleDropped],
    issued: Mapping[RolloutId, Rollout],
    ended: Collection[RolloutId],
    finished: Collection[RolloutId],
) -> None:
    """Raise AssertionError unless these previews, all that stop at one event, are those that should.

    Args:
        ended: ids of rollouts with an outcome, ``stopped`` included.
    """
    slots: dict[str, list[SampleDropped]] = defaultdict(list)
    for record in stopped:
        assert issued[record.rollout].purpose is Purpose.EXPLORE, f"{record.rollout} is no preview, and stops"
        assert record.rollout not in finished, f"{record.rollout} stops after its end"
        slots[record.rollout.rpartition("-")[0]].append(record)
    plan, explores = scenario.plan, scenario.plan.exploration
    rungs = rungs_of(explores, plan.group_size, plan.rollout_steps) if explores else ()
    for slot, records in slots.items():
        (step,) = {int(record.detail.split()[4]) for record in records}
        left = [name for name in issued if name.rpartition("-")[0] == slot and name not in ended]
        (goes_on,) = [rung.goes_on for rung in rungs if rung.step == step]
        assert len(left) == goes_on, f"{len(left)} previews of {slot} go on at step {step}, not {goes_on}"
        seen = {
            name: scenario.rewards.reward(replace(issued[name], pause=step), plan)
            for name in (*left, *(record.rollout for record in records))
        }
        ends = [seen[record.rollout] for record in records]
        rewards = [seen[name] for name in left]
        assert max(ends) <= max(rewards), f"the best preview of {slot} stops at step {step}"
        best_alone = explores is not None and explores.policy == "top"
        assert best_alone or min(ends) >= min(rewards), f"the worst preview of {slot} stops at step {step}"
