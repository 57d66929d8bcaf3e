"""Samples whose reward compares a group are scored with it, once no more of it is to come."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from test_cluster import PLAN, SPOT, V0, Room, of, only

from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.iteration import Work
from spotlight.scheduler.policies.whole_groups.whole_groups import WholeGroups
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.types import Maker, Purpose, Rollout, RolloutId, WorkerId
from spotlight_rewards.base.prompts import Prompt, PromptId

COMPARES = dataclasses.replace(PLAN, compares=True, group_size=4)


def rollout(prompt: str, member: int, purpose: Purpose = Purpose.TRAIN) -> Rollout:
    name = RolloutId(f"{purpose}0-{prompt}-{member}")
    return Rollout(name, purpose, 0, PromptId(prompt), member, member, 4, V0)


def work_of(*issued: Rollout) -> tuple[Rollouts, WholeGroups]:
    controller = Controller(COMPARES, [Prompt(PromptId("a"), "a", {})], [])
    work = controller.work
    for each in issued:
        work.current.issue(each)
    policy = work.policies["whole-groups"]
    assert isinstance(policy, WholeGroups)
    return work, policy


def make(work: Work, policy: WholeGroups, *made: Rollout) -> None:
    work.makers |= {each.id: Maker(WorkerId("w"), 1) for each in made}
    assert policy.waits_to_score(made)


def asked(work: Rollouts, policy: WholeGroups) -> list[ef.ScoreSamples]:
    """What is to be scored now."""
    work.effects = []
    policy.after_event()
    return [each for each in work.effects if isinstance(each, ef.ScoreSamples)]


@given(st.data())
def test_each_sample_leaves_once_with_all_of_its_group(data: st.DataObject) -> None:
    issued = [rollout(prompt, member) for prompt in "abc" for member in range(4)]
    order = data.draw(st.permutations(issued))
    failing = data.draw(st.sets(st.sampled_from(issued)))
    (work, policy), left = work_of(*issued), list[Rollout]()
    for at, made in enumerate(order):
        if made in failing:
            work.current.unscored.discard(made.id)
        else:
            make(work.current, policy, made)
        for group in asked(work, policy):
            assert not {each.prompt_id for each in order[at + 1 :]} & {group.rollouts[0].prompt_id}
            assert group.size == 4
            left += group.rollouts
    assert sorted(left, key=lambda each: each.id) == [each for each in issued if each not in failing]


def test_a_group_begun_early_waits_for_members_not_issued_yet() -> None:
    begun = [rollout("a", member) for member in range(2)]
    work, policy = work_of(*begun)
    make(work.current, policy, *begun)
    assert asked(work, policy) == []
    for member in (2, 3):
        work.current.rollouts[rollout("a", member).id] = rollout("a", member)  # and dropped
    (group,) = asked(work, policy)
    assert (group.rollouts, group.size) == (tuple(begun), 4)


def test_evaluation_and_training_of_a_prompt_are_two_groups() -> None:
    judged, trained = rollout("a", 0, Purpose.EVAL), [rollout("a", member) for member in range(4)]
    work, policy = work_of(judged, *trained)
    make(work.current, policy, judged, trained[0])
    (group,) = asked(work, policy)
    assert (group.rollouts, group.size) == ((judged,), 1)


def test_a_sample_that_is_not_wanted_any_more_is_not_scored() -> None:
    issued = [rollout("a", member) for member in range(4)]
    work, policy = work_of(*issued)
    make(work.current, policy, *issued[:3])
    work.current.unscored.discard(issued[0].id)
    work.current.unscored.discard(issued[3].id)
    (group,) = asked(work, policy)
    assert group.rollouts == tuple(issued[1:3])


def test_the_controller_accepts_samples_before_it_asks_for_their_scores() -> None:
    room = Room(dataclasses.replace(COMPARES, group_size=2))
    group = room.bring_up(dataclasses.replace(SPOT, gpus=1))[0]
    grant = only(room.pull(group), ef.GrantLease)
    done = ev.LeaseCompleted(group.leader, grant.lease.id, group.epoch, grant.lease.rollouts, V0)
    effects = room.feed(done)
    assert [each.id for each in ef.accepted(effects, done.rollouts)][: len(done.rollouts)] == [*done.rollouts]
    (held,) = of(effects, ef.HoldSamples)
    assert [each.id for each in held.rollouts] == [*done.rollouts]
