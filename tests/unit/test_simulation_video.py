"""Videos in virtual time: their frames make them large, so the tail of a batch gets more GPUs for each."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pytest

from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.placement import choose_degree
from spotlight.scheduler.plan import latent_frames
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import STRATEGIES
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.simulation.scenario import Scenario
from spotlight_plan.simulation.virtual_driver import Simulation
from spotlight_plan.simulation.virtual_workers import Receipt

NOW = datetime(2026, 11, 21, tzinfo=UTC)
SMALL = (
    "cluster.reserved.nodes=1",
    "cluster.spot.nodes=1",
    "workload.prompts=1",
    "workload.group_size=8",
    "run.iterations=2",
    "cluster.reserved.rolls_out=true",
    "trace.mean_uptime_h=10000",
    "trace.bursts_per_h=0",
)
"""Eight GPUs that train and roll out, eight that stay and roll out, and eight videos for them."""


def scenario(name: str, *overrides: str) -> Scenario:
    strategy = STRATEGIES["spot_rollout_only"]
    return scenario_of(prepare(load_scenario(name, overrides), (strategy.name,), NOW), strategy)


class Granted(Simulation):
    """Remembers of each grant the iteration, how many GPUs got it, and of how many rollouts it was."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.grants: Counter[tuple[int, int, int]] = Counter()

    def observe(self, event: ev.Event, effects: list[ef.Effect], receipt: Receipt | None) -> None:
        for effect in effects:
            if isinstance(effect, ef.GrantLease):
                group = self.controller.cluster.groups[effect.lease.worker]
                self.grants[self.controller.iteration, len(group.members), len(effect.rollouts)] += 1


@pytest.mark.parametrize(("frames", "latent"), [(1, 1), (5, 2), (81, 21), (129, 33)])
def test_a_video_has_fewer_latent_frames(frames: int, latent: int) -> None:
    assert latent_frames(frames) == latent


@pytest.mark.parametrize(("rollouts", "degree"), [(2000, 1), (1000, 1), (500, 2), (200, 4), (100, 8)])
def test_the_tail_of_a_thousand_gpus_gets_higher_degrees(rollouts: int, degree: int) -> None:
    plan = scenario("video-1000").plan.cluster
    assert plan.pixels < plan.sp_pays_from_pixels, "one frame alone would be too small"
    assert choose_degree(plan, 1000, rollouts) == degree


def test_small_images_stay_on_one_gpu_each() -> None:
    assert choose_degree(scenario("paper-512").plan.cluster, 12, 1) == 1


def test_sixteen_gpus_share_eight_videos() -> None:
    simulation = Granted(scenario("video-1000", *SMALL))
    simulation.begin()
    while simulation.step():
        pass
    assert simulation.finish is not None
    assert simulation.finish.error is None
    assert {size for _, _, size in simulation.grants} == {1}, "nobody has two while others have none"
    # In the first iteration GPUs come up one by one, and begin alone.
    later = {key: times for key, times in simulation.grants.items() if key[0] == 1}
    assert later == {(1, 2, 1): 8}, "each of eight videos is made once, by two GPUs"
