"""A group that asks for more work while it holds some: its leases are its own, and its share is."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cluster import PLAN, SPOT, Room, of, only

from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.types import LeaseId, NodeId, PolicyVersion, RolloutId

WIDE = dataclasses.replace(PLAN, group_size=4)  # eight rollouts
OTHER = dataclasses.replace(SPOT, id=NodeId("t"), gpus=1)
ONE = dataclasses.replace(SPOT, gpus=1)


def pull(
    room: Room, group: ef.FormGroup, capacity: int, seen: int, holds: tuple[int, ...] = ()
) -> list[ef.Effect]:
    held = tuple(map(LeaseId, holds))
    return room.feed(ev.GroupPulled(group.leader, group.epoch, capacity, LeaseId(seen), held))


def finish(room: Room, group: ef.FormGroup, grant: ef.GrantLease) -> list[ef.Effect]:
    names = tuple(rollout.id for rollout in grant.rollouts)
    return room.feed(ev.LeaseCompleted(group.leader, grant.lease.id, group.epoch, names, PolicyVersion(0)))


def held(room: Room, group: ef.FormGroup) -> set[int]:
    return {int(lease.id) for lease, _ in room.controller.work.queue.held_by(group.leader)}


def test_what_a_group_holds_is_not_renounced() -> None:
    room = Room(WIDE)
    (group,) = room.bring_up(ONE)
    first = only(pull(room, group, 2, 0), ef.GrantLease)
    second = only(pull(room, group, 2, int(first.lease.id), (int(first.lease.id),)), ef.GrantLease)
    assert not {r.id for r in first.rollouts} & {r.id for r in second.rollouts}
    assert held(room, group) == {int(first.lease.id), int(second.lease.id)}
    assert room.count(Recovery.LEASE_RENOUNCED) == 0


def test_what_it_saw_and_does_not_hold_goes_to_another() -> None:
    room = Room(WIDE)
    (group,) = room.bring_up(ONE)
    first = only(pull(room, group, 2, 0), ef.GrantLease)
    second = only(pull(room, group, 2, int(first.lease.id), (int(first.lease.id),)), ef.GrantLease)
    number = int(second.lease.id)
    third = only(pull(room, group, 2, number, (number,)), ef.GrantLease)
    assert room.count(Recovery.LEASE_RENOUNCED) == 1
    assert held(room, group) == {number, int(third.lease.id)}
    assert {r.id for r in third.rollouts} == {r.id for r in first.rollouts}
    late = finish(room, group, first)
    assert not of(late, ef.ScoreSamples), "what was renounced does not count any more"


def test_a_grant_that_was_lost_is_sent_again_before_anything_new() -> None:
    room = Room(WIDE)
    (group,) = room.bring_up(ONE)
    first = only(pull(room, group, 2, 0), ef.GrantLease)
    number = int(first.lease.id)
    second = only(pull(room, group, 2, number, (number,)), ef.GrantLease)
    again = only(pull(room, group, 4, number, (number,)), ef.GrantLease)
    assert again == second
    assert room.count(Recovery.GRANT_RESENT) == 1
    assert room.count(Recovery.LEASE_RENOUNCED) == 0


def test_a_group_takes_no_more_than_its_share_however_often_it_asks() -> None:
    room = Room(WIDE)
    (one,), (two,) = room.bring_up(ONE), room.bring_up(OTHER)
    first = only(pull(room, one, 3, 0), ef.GrantLease)
    number = int(first.lease.id)
    second = only(pull(room, one, 8, number, (number,)), ef.GrantLease)
    assert len(first.rollouts) + len(second.rollouts) == 4, "eight rollouts, two groups"
    seen = int(second.lease.id)
    assert not of(pull(room, one, 8, seen, (number, seen)), ef.GrantLease)
    assert len(only(pull(room, two, 8, 0), ef.GrantLease).rollouts) == 4


def test_one_that_has_its_share_takes_what_a_lost_taker_leaves() -> None:
    room = Room(WIDE)
    (one,), (two,) = room.bring_up(ONE), room.bring_up(OTHER)
    first = only(pull(room, one, 8, 0), ef.GrantLease)
    only(pull(room, two, 8, 0), ef.GrantLease)
    number = int(first.lease.id)
    assert not of(pull(room, one, 8, number, (number,)), ef.GrantLease)
    rest = only(room.feed(ev.NodeLost(OTHER.id)), ef.GrantLease)
    assert rest.lease.worker == one.leader
    assert len(first.rollouts) + len(rest.rollouts) == 8


def test_one_that_has_its_share_does_not_wait_for_a_taker_that_never_asks() -> None:
    room = Room(WIDE)
    (one,), _ = room.bring_up(ONE), room.bring_up(OTHER)
    first = only(pull(room, one, 8, 0), ef.GrantLease)
    assert len(first.rollouts) == 4
    number = int(first.lease.id)
    assert not of(pull(room, one, 8, number, (number,)), ef.GrantLease)
    # Its own work done, it asks for the rest and gets its part of it, and again.
    done = finish(room, one, first)
    while grants := of(done, ef.GrantLease):
        (grant,) = grants
        done = finish(room, one, grant)
        if room.controller.work.queue.outstanding:
            done += pull(room, one, 8, int(grant.lease.id))
    assert room.controller.work.queue.outstanding == 0


@pytest.mark.parametrize("stale", [1, -1])
def test_a_pull_of_another_epoch_touches_no_lease(stale: int) -> None:
    room = Room(WIDE)
    (group,) = room.bring_up(ONE)
    first = only(pull(room, group, 2, 0), ef.GrantLease)
    number = int(first.lease.id)
    room.feed(ev.GroupPulled(group.leader, group.epoch + stale, 8, LeaseId(number), ()))
    assert held(room, group) == {number}


@given(data=st.data())
@settings(max_examples=60)
def test_all_work_is_done_once_whatever_is_lost_on_the_way(data: st.DataObject) -> None:
    """Two groups that pull early, lose grants, forget leases, are lost: one that lives ends everything."""
    room = Room(WIDE)
    groups = [room.bring_up(ONE)[0], room.bring_up(OTHER)[0]]
    has: list[dict[int, ef.GrantLease]] = [{}, {}]
    seen = [0, 0]
    done: list[RolloutId] = []
    alive = [True, True]

    def take(effects: list[ef.Effect], lossy: bool) -> None:
        for effect in effects:
            if isinstance(effect, ef.ScoreSamples):
                done.extend(rollout.id for rollout in effect.rollouts)
            elif isinstance(effect, ef.GrantLease) and not (lossy and data.draw(st.booleans())):
                index = [group.leader for group in groups].index(effect.lease.worker)
                if int(effect.lease.id) > seen[index]:
                    has[index][int(effect.lease.id)] = effect
                    seen[index] = int(effect.lease.id)
            elif isinstance(effect, ef.AbandonLease):
                for leases in has:
                    leases.pop(int(effect.lease), None)

    def ask(index: int, capacity: int, lossy: bool) -> None:
        take(pull(room, groups[index], capacity, seen[index], tuple(has[index])), lossy)

    for _ in range(data.draw(st.integers(0, 15))):
        index = data.draw(st.integers(0, 1))
        if not alive[index]:
            continue
        what = data.draw(st.sampled_from(["pull", "pull", "finish", "forget", "lose"]))
        if what == "pull":
            ask(index, data.draw(st.integers(1, 8)), lossy=True)
        elif what == "finish" and has[index]:
            _, grant = has[index].popitem()
            take(finish(room, groups[index], grant), lossy=True)
        elif what == "forget" and has[index]:
            has[index].popitem()
        elif what == "lose" and index == 1:
            alive[1] = False
            take(room.feed(ev.NodeLost(OTHER.id)), lossy=True)
    for _ in range(40):
        for index in (0, 1):
            if alive[index]:
                ask(index, 8, lossy=False)
                while has[index]:
                    take(finish(room, groups[index], has[index].popitem()[1]), lossy=False)
    assert len(done) == len(set(done)) == 8
