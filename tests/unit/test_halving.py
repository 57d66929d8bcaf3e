"""Previews that stop early: which of them, how many, what becomes of the others, and what it saves."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_exploration import Watched, of_iteration, ran

from spotlight.config.load import load_config
from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler.exploration.halving import Rung, next_pause, pool_variance, rungs_of, stopped
from spotlight.scheduler.exploration.selection import SelectionPolicy, sample_variance
from spotlight.scheduler.records import SampleDropped, SampleExplored, SampleFinished
from spotlight.scheduler.types import DropReason, Purpose

HALVED = ExplorationConfig(seeds_per_prompt=16, rungs=(4, 7), finishers=8)
RANKS = [SelectionPolicy.MAX_VARIANCE, SelectionPolicy.TOP_AND_BOTTOM, SelectionPolicy.TOP]
LOOKS = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]) | st.floats(0, 1), min_size=1, max_size=24)


def test_every_rung_leaves_the_same_share_down_to_the_finishers() -> None:
    assert rungs_of(HALVED, group_size=6, steps=10) == (Rung(4, 12), Rung(7, 8))
    single = HALVED.model_copy(update={"rungs": (5,), "finishers": None})
    assert rungs_of(single, group_size=6, steps=10) == (Rung(5, 9),), "the group's size, half as many more"
    quarters = HALVED.model_copy(update={"seeds_per_prompt": 32})
    assert [rung.goes_on for rung in rungs_of(quarters, 6, 10)] == [16, 8]
    assert rungs_of(HALVED.model_copy(update={"rungs": None, "finishers": None}), 6, 10) == ()
    assert [next_pause(rungs_of(HALVED, 6, 10), step) for step in (0, 4, 7)] == [4, 7, None]


@given(LOOKS, st.integers(2, 24), st.sampled_from(RANKS))
def test_those_in_the_middle_stop_and_no_more_than_the_rung_says(
    rewards: list[float], goes_on: int, policy: SelectionPolicy
) -> None:
    looks = dict(enumerate(rewards))
    ends = stopped(looks, goes_on, policy)
    left = [looks[seed] for seed in looks.keys() - ends]
    assert len(left) == goes_on or not ends
    if not ends:
        assert len(looks) <= goes_on or max(rewards) == min(rewards)
        return
    middle = [looks[seed] for seed in ends]
    assert max(middle) <= max(left)
    if policy is SelectionPolicy.TOP:
        assert max(middle) <= min(left)
    else:
        assert min(middle) >= min(left)
    assert stopped(dict(reversed(looks.items())), goes_on, policy) == ends, "in whatever order they arrived"


def test_the_pools_variance_is_found_from_those_that_were_not_stopped() -> None:
    """Each look knows what the one before did, and more."""
    source = random.Random(0)
    estimates, naive, true = [], [], []
    for _ in range(400):
        first = {seed: source.gauss(0, 0.7) for seed in range(32)}
        later = {seed: look + source.gauss(0, 0.5) for seed, look in first.items()}
        rewards = {seed: look + source.gauss(0, 0.5) for seed, look in later.items()}
        left = {seed: later[seed] for seed in later.keys() - stopped(first, 20, SelectionPolicy.MAX_VARIANCE)}
        ends = left.keys() - stopped(left, 12, SelectionPolicy.MAX_VARIANCE)
        left, looks = {seed: rewards[seed] for seed in ends}, [first, left]
        estimates.append(pool_variance(looks, left))
        naive.append(sample_variance(list(left.values())))
        true.append(sample_variance(list(rewards.values())))
    assert statistics.fmean(estimates) == pytest.approx(statistics.fmean(true), rel=0.05)
    assert statistics.fmean(naive) > 1.5 * statistics.fmean(true)


def kept(explores: ExplorationConfig, **changes: Any) -> Watched:
    return ran(explores, keeps_previews=True, **changes)


def drops(run: Watched) -> list[SampleDropped]:
    records = [one.record for one in run.seen if isinstance(one, ef.WriteRecord)]
    return [record for record in records if isinstance(record, SampleDropped)]


def test_of_every_prompt_as_many_run_to_their_end_as_asked_for() -> None:
    run = kept(HALVED)
    slots: dict[str, list[str]] = defaultdict(list)
    for record in drops(run):
        assert record.reason is DropReason.STOPPED_EARLY
        slots[record.rollout.rpartition("-")[0]].append(record.detail)
    assert len(slots) == 6 * 4
    for details in slots.values():
        assert details.count("in the middle after 4 of 10 steps") == 4
        assert details.count("in the middle after 7 of 10 steps") == 4
    previews = {one.id for one in run.issued if one.purpose is Purpose.EXPLORE}
    assert len(previews) == 6 * 4 * 16
    finished = {one for one in run.ended(SampleFinished) if one in previews}
    assert finished == run.ended(SampleExplored), "a preview that stops is neither finished nor explored"
    assert len(finished) == 6 * 4 * 8


def test_groups_are_previews_that_ran_to_their_end_and_nothing_is_made_again() -> None:
    run = kept(HALVED)
    granted = [one for effect in run.seen if isinstance(effect, ef.GrantLease) for one in effect.rollouts]
    assert not [one for one in granted if one.purpose is Purpose.TRAIN]
    for iteration in range(6):
        finishers = {
            one.seed
            for one in of_iteration(run.issued, Purpose.EXPLORE, iteration)
            if one.id in run.ended(SampleExplored)
        }
        trained = {one.seed for one in of_iteration(run.issued, Purpose.TRAIN, iteration)}
        assert trained <= finishers
    for report in run.reports:
        assert report["halving"] == {"stopped": 4 * 8, "steps_saved": 4 * (4 * 6 + 4 * 3)}
        assert report["window"]["issued"] == 4 * 16
        assert report["kept"] == 4 * 6
        assert not report["window"]["cut_off"]


def steps_of(run: Watched) -> int:
    grants = [effect for effect in run.seen if isinstance(effect, ef.GrantLease)]
    return sum(one.until - each.resume.get(one.id, 0) for each in grants for one in each.rollouts)


def test_it_saves_steps_and_keeps_most_of_the_contrast() -> None:
    whole = HALVED.model_copy(update={"rungs": None, "finishers": None})
    plain, halved = kept(whole), kept(HALVED)
    saved = sum(report["halving"]["steps_saved"] for report in halved.reports)
    assert steps_of(plain) == 6 * 4 * 16 * 10
    assert steps_of(halved) == steps_of(plain) - saved
    assert saved == 0.225 * steps_of(plain)

    def mean(run: Watched, name: str) -> float:
        return statistics.fmean(report["contrast"][name] for report in run.reports)

    assert mean(halved, "realised") > 0.8 * mean(plain, "realised")
    once = kept(HALVED.model_copy(update={"rungs": (6,)}))
    assert mean(once, "random") == pytest.approx(mean(plain, "random"), rel=0.25)


def test_a_prompt_that_looks_flat_stops_nothing_and_a_spare_one_is_halved_too() -> None:
    from spotlight.simulation.virtual_rewards import RewardModel

    run = kept(HALVED.model_copy(update={"spare_prompts": 4}), rewards=RewardModel(flat_share=0.4))
    flat = [report["selection"].get("no_contrast", 0) for report in run.reports]
    spare = [report["selection"]["replaced_prompts"] for report in run.reports]
    assert sum(spare) > 0
    stops = [report["halving"]["stopped"] for report in run.reports]
    for at, report in enumerate(run.reports):
        pools = report["window"]["issued"] // 16
        assert stops[at] == 8 * (pools - flat[at])


CRITICAL = dict(HALVED)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rungs": (7, 4)}, "rungs"),
        ({"rungs": (4, 10)}, "rungs"),
        ({"rungs": None}, "finishers"),
        ({"finishers": 5}, "finishers"),
        ({"finishers": 16}, "finishers"),
        ({"steps": 8}, "steps"),
        ({"sampled_prompts": 1}, "sampled_prompts"),
        ({"policy": "proportional"}, "policy"),
    ],
)
def test_settings_that_contradict_rungs_are_named(changes: dict[str, Any], key: str) -> None:
    section = ExplorationConfig.model_validate({**CRITICAL, **changes})
    (problem,) = section.rung_problems(group_size=6, steps=10, section="rollout")
    assert problem.key == f"exploration.{key}"
    assert not [*HALVED.rung_problems(group_size=6, steps=10, section="rollout")]


@pytest.mark.parametrize("other", ["where=idle", "step_cache=2", "dtype=bfloat16"])
def test_rungs_need_previews_that_are_rollouts(other: str) -> None:
    from spotlight.config.errors import ConfigError

    ray = ["fleet.driver=ray", "exploration.rungs=[4]"]
    with pytest.raises(ConfigError, match=r"exploration\.rungs"):
        load_config(None, [*ray, f"exploration.{other}"])
    assert load_config(None, ray).exploration is not None


def test_a_preview_that_is_lost_is_not_waited_for() -> None:
    """Half of the rewards fail: rungs are decided among the others, and the window closes."""

    class Failing(Watched):
        def begin(self) -> None:
            super().begin()
            self.reward_failing = 0.3

    run = kept(HALVED, kind=Failing, max_drop_share=1.0)
    reasons = {record.reason for record in drops(run)}
    assert {DropReason.STOPPED_EARLY, DropReason.REWARD_TIMEOUT} <= reasons
    assert dataclasses.asdict(run.controller.ledger)["trained"] > 0
