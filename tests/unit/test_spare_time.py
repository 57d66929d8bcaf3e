"""Previews made in idle time: when they begin, how far they go, and how they give way."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

import pytest
from queue_machine import make_rollout
from test_cluster import PLAN as CLUSTERED
from test_cluster import SPOT, V0, Room, of, only
from test_exploration import IDLE, PLAN, Watched, of_iteration, ran, revised

from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.queue import PullQueue, WorkClass
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.cluster.spare_time import SpareTime
from spotlight.scheduler.plan import ClusterPlan
from spotlight.scheduler.policies.exploration.exploring import Exploration
from spotlight.scheduler.policies.exploration.window import Window
from spotlight.scheduler.records import SampleExplored
from spotlight.scheduler.types import Node, NodeId, NodeKind, Purpose, WorkerId
from spotlight_plan.compare import outcome_of
from spotlight_plan.simulation.scenario import SimulationResult
from spotlight_plan.simulation.virtual_rewards import RewardModel

EXPLORES = ExplorationConfig(where="idle", seeds_per_prompt=6, steps=4, seeds_per_prompt_max=9)
SMALL = dataclasses.replace(
    CLUSTERED, exploration=EXPLORES, cluster=ClusterPlan(answer_s=5.0, start_s=60.0), prompts_per_iteration=1
)
"""One group of two rollouts, then previews."""
TRAINER = Node(NodeId("r"), NodeKind.RESERVED, 1, "H100", 8.0, True, True)


def window_of(room: Room) -> Window:
    explores = room.controller.work.policies["exploration"]
    assert isinstance(explores, Exploration)
    return explores.window


def purposes(effects: Iterable[ef.Effect]) -> list[Purpose]:
    return [one.purpose for grant in effects if isinstance(grant, ef.GrantLease) for one in grant.rollouts]


def finish(room: Room, group: ef.FormGroup, grant: ef.GrantLease) -> list[ef.Effect]:
    return room.feed(ev.LeaseCompleted(group.leader, grant.lease.id, group.epoch, grant.lease.rollouts, V0))


def test_a_window_opens_when_nothing_better_waits_and_never_before() -> None:
    room = Room(SMALL)
    one, other = room.bring_up()
    room.pull(one)
    assert window_of(room).opened_s is None, "a rollout still waits"
    room.pull(other)
    room.wait(7.0)
    assert window_of(room).opened_s == 7.0, "all are taken: a new worker would idle"
    assert window_of(room).iteration == 1


def test_a_preview_gives_way_to_a_rollout_that_waits_again() -> None:
    room = Room(SMALL)
    groups = room.bring_up(dataclasses.replace(SPOT, gpus=3))
    grants = [only(room.pull(group), ef.GrantLease) for group in groups]
    assert [purposes([grant]) for grant in grants] == [[Purpose.TRAIN], [Purpose.TRAIN], [Purpose.EXPLORE]]
    room.wait(CLUSTERED.lease_s / 2)
    room.feed(ev.LeaseProgressed(groups[2].leader, grants[2].lease.id, groups[2].epoch, 2))
    (abandon,) = of(room.feed(crash(room, groups[0])), ef.AbandonLease)
    assert (abandon.leader, abandon.lease) == (groups[2].leader, grants[2].lease.id)
    assert room.count(Recovery.PREVIEWS_YIELDED) == 1
    again = only(room.pull(groups[2], seen=grants[2].lease.id), ef.GrantLease)
    assert again.lease.rollouts == grants[0].lease.rollouts
    (late,) = of(finish(room, groups[2], grants[2]), ef.AbandonLease)
    assert late.lease == grants[2].lease.id, "what was given back counts no more"


def crash(room: Room, group: ef.FormGroup) -> ev.WorkerCrashed:
    return ev.WorkerCrashed(group.leader, room.controller.cluster.workers[group.leader].epoch)


def test_as_many_give_way_as_it_takes_and_one_that_does_not_pull_is_not_counted_on() -> None:
    room = Room(SMALL)
    groups = room.bring_up(dataclasses.replace(SPOT, gpus=5))
    grants = [only(room.pull(group), ef.GrantLease) for group in groups]
    abandoned = of(room.feed(crash(room, groups[0])), ef.AbandonLease)
    assert len(abandoned) == 1, "one rollout waits"
    assert abandoned[0].lease == grants[-1].lease.id, "the youngest previews lose least"
    assert not of(room.wait(SMALL.cluster.answer_s / 2), ef.AbandonLease)
    later = of(room.wait(SMALL.cluster.answer_s), ef.AbandonLease)
    assert [one.lease for one in later] == [grants[-2].lease.id]


def test_who_gives_way_gives_back_all_its_previews() -> None:
    queue = PullQueue(10.0)
    queue.add(make_rollout(n, Purpose.EXPLORE) for n in range(4))
    one, other, lost = (WorkerId(name) for name in "abc")
    for worker in (one, other, lost):
        queue.admit(worker)
    for worker in (one, other, one, lost):
        assert queue.pull(worker, 1, 0.0) is not None
    spare = SpareTime(queue, 5.0, explores=True)
    given = spare.preempt(1, lambda worker: worker != lost, 1.0)
    assert [lease.worker for lease in given] == [one, one]
    assert spare.awaited(1.0) == 1
    assert not spare.preempt(1, lambda worker: worker != lost, 2.0), "one is counted on"
    assert [lease.worker for lease in spare.preempt(1, lambda worker: worker != lost, 9.0)] == [other]


def test_a_group_makes_no_previews_beside_better_work() -> None:
    room = Room(SMALL)
    (group,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    grant = only(room.pull(group, capacity=2), ef.GrantLease)
    assert purposes([grant]) == [Purpose.TRAIN] * 2
    more = ev.GroupPulled(group.leader, group.epoch, 2, grant.lease.id, (grant.lease.id,))
    granted = purposes(room.feed(more))
    assert room.controller.queue.waiting_of(WorkClass.EXPLORE)
    assert not granted, "in one forward with previews its rollouts would take longer"
    finish(room, group, grant)
    assert purposes(room.pull(group, capacity=2, seen=grant.lease.id)) == [Purpose.EXPLORE] * 2


def test_previews_are_given_up_by_a_group_that_gets_better_work() -> None:
    room = Room(SMALL)
    groups = room.bring_up(dataclasses.replace(SPOT, gpus=3))
    grants = [
        only(room.pull(group, capacity=1 + 5 * (group is groups[2])), ef.GrantLease) for group in groups
    ]
    assert purposes(grants[2:]) == [Purpose.EXPLORE] * 2, "its share"
    held = grants[2].lease.id
    room.feed(ev.GroupPulled(groups[2].leader, groups[2].epoch, 4, held, (held,)))
    effects = room.feed(crash(room, groups[0]))
    assert {one.lease for one in of(effects, ef.AbandonLease)} >= {held}
    assert Purpose.TRAIN in purposes(effects)
    assert room.controller.queue.count_held_by(groups[2].leader) == 1


def test_gpus_that_train_make_no_previews_in_idle_time() -> None:
    room = Room(SMALL)
    (trainer,) = room.bring_up(TRAINER)
    grant = only(room.pull(trainer, capacity=2), ef.GrantLease)
    finish(room, trainer, grant)
    assert window_of(room).opened_s is not None
    assert not purposes(room.pull(trainer, capacity=2, seen=grant.lease.id))
    (group,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    assert purposes(room.pull(group)) == [Purpose.EXPLORE]


def test_tails_still_get_larger_groups_past_previews() -> None:
    plan = dataclasses.replace(CLUSTERED, exploration=EXPLORES, prompts_per_iteration=1)
    room = Room(plan)
    node = dataclasses.replace(SPOT, gpus=4)
    for group in room.bring_up(node):
        for stop in of(room.pull(group), ef.StopGroup):
            room.feed(ev.GroupStopped(stop.leader, stop.epoch))
    sizes = Counter(len(group.members) for group in room.controller.cluster.groups.values())
    assert sizes[2] >= 1, "two rollouts, four GPUs, and previews to no end"


def pools(run: Watched, iteration: int) -> list[int]:
    explored = run.ended(SampleExplored)
    used = Counter(
        one.prompt_id for one in of_iteration(run.issued, Purpose.EXPLORE, iteration) if one.id in explored
    )
    return sorted(used.values())


def test_idle_time_deepens_the_pools_evenly_and_with_an_end() -> None:
    plain = ran(IDLE, learns_s=8.0)
    deep = ran(revised(IDLE, seeds_per_prompt_max=1000), learns_s=8.0)
    bounded = ran(revised(IDLE, seeds_per_prompt_max=18), learns_s=8.0)
    for iteration in range(2, PLAN.iterations):
        assert pools(plain, iteration) == [16] * 4
        assert pools(bounded, iteration) == [18] * 4
        assert min(pools(deep, iteration)) > 18
        assert max(pools(deep, iteration)) - min(pools(deep, iteration)) <= 4, "but for a lease cut off"
    assert len({one.seed for one in of_iteration(deep.issued, Purpose.EXPLORE, 3)}) == len(
        of_iteration(deep.issued, Purpose.EXPLORE, 3)
    )
    for run in (plain, bounded, deep):
        report = run.reports[-1]
        assert not report["window"]["cut_off"], "what was planned is scored"
        sizes = pools(run, report["iteration"])
        assert report["selection"]["pool_size"] == sum(sizes) / len(sizes)
    ends = [run.iterations[-1].end_s for run in (plain, deep)]
    assert ends[1] <= ends[0] * 1.02, "at no cost in time"


def test_deep_pools_of_one_window_do_not_make_up_for_another() -> None:
    run = ran(revised(IDLE, seeds_per_prompt_max=32), learns_s=12.0)

    def share(result: SimulationResult) -> float:
        return outcome_of("spotlight", run.scenario, result, None).preview_share

    whole = run.result()
    assert share(whole) == 1.0
    first, *others = whole.explorations
    assert all(one["window"]["scored"] > one["window"]["planned"] for one in whole.explorations)  # type: ignore[index]
    half = {**first, "window": {"planned": 64, "scored": 32}}
    assert share(dataclasses.replace(whole, explorations=(half, *others))) == 1 - 0.5 / 5
    assert share(dataclasses.replace(whole, explorations=tuple(others))) == 1 - 1 / 5, "one was left out"


@pytest.mark.slow  # means of sixty iterations
def test_a_deeper_pool_is_judged_by_its_real_size() -> None:
    found = {}
    for limit in (16, 64):
        exploration = revised(IDLE, seeds_per_prompt_max=limit)
        run = ran(exploration, RewardModel(variety=0.0), learns_s=12.0, iterations=60)
        gains = [report["contrast"] for report in run.reports if report["contrast"]]
        found[limit] = {name: sum(one[name] for one in gains) / len(gains) for name in ("realised", "random")}
    assert found[16]["random"] == pytest.approx(0.04, rel=0.15), "what random seeds have, whatever the pool"
    assert found[64]["random"] == pytest.approx(0.04, rel=0.15)
    assert found[64]["realised"] > found[16]["realised"], "of more seeds the chosen differ more"


def test_a_prompt_without_contrast_is_replaced_once_and_not_deepened() -> None:
    exploration = revised(IDLE, spare_prompts=2, seeds_per_prompt_max=40)
    run = ran(exploration, RewardModel(flat_share=0.4), learns_s=12.0)
    for iteration in range(2, PLAN.iterations):
        members = Counter(one.prompt_id for one in of_iteration(run.issued, Purpose.EXPLORE, iteration))
        replaced = len(members) - PLAN.prompts_per_iteration
        counts = sorted(members.values())
        assert 0 < replaced <= 2
        assert max(counts[:replaced], default=0) <= 20, "deepened only until its last previews were scored"
        assert counts[replaced:] == [40] * PLAN.prompts_per_iteration, "and the spare ones in its place"
