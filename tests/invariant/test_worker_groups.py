"""Worker loops in sequence-parallel groups of processes that die, stop and come back. gloo, four ranks."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor
from worker_ranks import BATCH, Deadline, Mishap, NoRoom, Ranks, Room
from worker_world import (
    Body,
    MemoryHome,
    form,
    grant,
    home_with_prompts,
    loop,
    mark_of,
    pull,
    ready,
    rollout,
    work_off,
)

from spotlight.scheduler.effects import AbandonLease
from spotlight.scheduler.events import (
    GroupFormed,
    GroupPulled,
    GroupStopped,
    LeaseCompleted,
    LeaseProgressed,
    WeightsPulled,
)
from spotlight.scheduler.types import LeaseId, Purpose, Rollout, RolloutId, WorkerId
from spotlight.worker.interfaces import FollowLease

TOLERANCE = 2e-5
"""Largest difference of latents (standard deviation about 1) that degrees and batch mates may make."""

ALL = ("w0", "w1", "w2", "w3")
STEPS = 6
TRIO = [rollout(seed, STEPS) for seed in (1, 2, 3)]
EVALS = [rollout(seed, STEPS, Purpose.EVAL) for seed in (4, 5)]


@pytest.fixture(scope="module")
def undisturbed(
    random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MemoryHome, dict[RolloutId, Tensor]]:
    """A home with the prompts, and what a worker alone makes."""
    body = Body.build(random_pipeline, tmp_path_factory.mktemp("embeds"))
    home = home_with_prompts(body.family)
    values = dict(home.values)
    worker, _ = loop(body, home)
    ready(worker, home)
    worker.commands.put(grant(1, TRIO))
    worker.commands.put(grant(2, EVALS))
    work_off(worker)
    made = {one.id: home.sample(one.id, mark_of(0))["final"] for one in (*TRIO, *EVALS)}
    return MemoryHome(values), made


@pytest.fixture(scope="module")
def processes(
    random_pipeline: Path,
    tmp_path_factory: pytest.TempPathFactory,
    undisturbed: tuple[MemoryHome, dict[RolloutId, Tensor]],
) -> Iterator[Ranks]:
    ranks = Ranks(random_pipeline, tmp_path_factory.mktemp("ranks"), undisturbed[0])
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(processes: Ranks) -> Ranks:
    """Every test begins with living workers and a home that holds only prompts."""
    home = processes.home
    for key in [key for key in home.values if key[0] != "condition"]:
        del home.values[key]
    processes.revive(*ALL)
    for name in ALL:
        processes.tell(name, Deadline(60.0))
    return processes


@pytest.fixture
def expected(undisturbed: tuple[MemoryHome, dict[RolloutId, Tensor]]) -> dict[RolloutId, Tensor]:
    return undisturbed[1]


def completed(ranks: Ranks) -> set[RolloutId]:
    return {name for event in ranks.home.of(LeaseCompleted) for name in event.rollouts}


def assert_made(ranks: Ranks, expected: dict[RolloutId, Tensor], rollouts: list[Rollout]) -> None:
    wanted = {one.id for one in rollouts}
    ranks.until(lambda: wanted <= completed(ranks))
    for name in wanted:
        found = ranks.home.sample(name, mark_of(0))["final"]
        assert (found - expected[name]).abs().max() <= TOLERANCE


def safe(ranks: Ranks, lease: int) -> int:
    return max((event.steps for event in ranks.home.of(LeaseProgressed) if event.lease == lease), default=0)


def resume(rollouts: list[Rollout], step: int) -> dict[RolloutId, int]:
    return {one.id: step for one in rollouts} if step else {}


def await_stop(ranks: Ranks, leader: str, epoch: int) -> None:
    wanted = GroupStopped(WorkerId(leader), epoch)
    ranks.until(lambda: wanted in ranks.home.of(GroupStopped))


@pytest.mark.parametrize("degree", [2, 4])
def test_leases_of_two_slots_join_and_leave_a_group(
    ranks: Ranks, expected: dict[RolloutId, Tensor], degree: int
) -> None:
    epoch = ranks.form(*ALL[:degree])
    one = ranks.grant(TRIO[:1])
    ranks.until(lambda: safe(ranks, one) >= 2)
    two = ranks.grant(EVALS)
    three = ranks.grant(TRIO[1:])
    assert_made(ranks, expected, [*TRIO, *EVALS])
    ranks.until(lambda: any(e.seen == three and e.holds == () for e in ranks.home.of(GroupPulled)))
    assert {event.lease for event in ranks.home.of(LeaseCompleted)} == {one, two, three}
    # Idle, and called to what is over: nobody waits in a collective, and all hear what they are told.
    for name in ALL[1:degree]:
        ranks.tell(name, FollowLease(WorkerId("w0"), epoch, LeaseId(three)))
    for name in ALL[:degree]:
        ranks.tell(name, pull(0, lineage=1, name=name))
    ranks.until(lambda: len({e.worker for e in ranks.home.of(WeightsPulled)}) == degree, 20.0)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))]
)
def test_survivors_of_a_killed_rank_finish_its_rollouts(
    ranks: Ranks, expected: dict[RolloutId, Tensor], seed: int
) -> None:
    """SP4, one is killed within a step; two go on together and one alone, from what was committed."""
    draw = random.Random(seed)
    victim = draw.choice(ALL[1:]) if seed else "w0"
    mishap = Mishap("kill", draw.randrange(1, STEPS), draw.randrange(2))
    epoch = ranks.form(*ALL)
    ranks.tell(victim, mishap)
    lease = ranks.grant(TRIO)
    ranks.gone(victim)
    survivors = [name for name in ALL if name != victim]
    ranks.stop("w0", epoch, *survivors)
    await_stop(ranks, "w0", epoch)
    assert safe(ranks, lease) == mishap.step  # not one step is lost
    assert completed(ranks) == set()
    ranks.form(*survivors[:2])
    ranks.grant(TRIO[:2], resume(TRIO, mishap.step))
    ranks.form(survivors[2])
    ranks.grant(TRIO[2:], resume(TRIO[2:], mishap.step))
    assert_made(ranks, expected, TRIO)


def test_survivors_who_are_told_nothing_commit_and_say_so(
    ranks: Ranks, expected: dict[RolloutId, Tensor]
) -> None:
    """The leader dies between two steps of two weight slots: what waited is kept too."""
    epoch = ranks.form("w0", "w1")
    ranks.tell("w0", Mishap("kill", 5))  # each step is two forwards
    first, second = ranks.grant(TRIO), ranks.grant(EVALS)
    ranks.gone("w0")
    await_stop(ranks, "w0", epoch)
    assert sorted((safe(ranks, first), safe(ranks, second))) == [2, 3]
    ranks.form("w1")
    ranks.grant(TRIO, resume(TRIO, safe(ranks, first)))
    ranks.grant(EVALS, resume(EVALS, safe(ranks, second)))
    assert_made(ranks, expected, [*TRIO, *EVALS])


def test_a_stopped_rank_is_left_behind_and_its_past_does_not_count(
    ranks: Ranks, expected: dict[RolloutId, Tensor]
) -> None:
    ranks.form(*ALL)
    ranks.grant(TRIO)
    assert_made(ranks, expected, TRIO)  # slow first steps are over before the deadline counts
    ranks.home.clear()
    for name in ALL:
        ranks.tell(name, Deadline(2.0))
    epoch = ranks.form(*ALL)
    ranks.tell("w3", Mishap("stop", 2))
    lease = ranks.grant(EVALS)
    ranks.stopped("w3")
    ranks.stop("w0", epoch, "w0", "w1", "w2")
    await_stop(ranks, "w0", epoch)
    assert safe(ranks, lease) == 2
    later = ranks.form("w0", "w1")
    again = ranks.grant(EVALS, resume(EVALS, 2))
    assert_made(ranks, expected, EVALS)
    # It wakes up and finds itself alone. What it says is of its old group, what it is told of it void.
    ranks.signal("w3", signal.SIGCONT)
    old = GroupStopped(WorkerId("w0"), epoch)
    ranks.until(lambda: ranks.home.of(GroupStopped).count(old) >= 2)  # repeated until it arrives
    assert all(event.epoch == epoch for event in ranks.home.of(LeaseProgressed) if event.lease == lease)
    ranks.tell("w3", AbandonLease(WorkerId("w0"), epoch, LeaseId(lease)))
    ranks.tell("w3", FollowLease(WorkerId("w0"), later, LeaseId(again)))
    ranks.tell("w3", grant(lease, EVALS, epoch, "w3"))
    assert ranks.home.of(LeaseCompleted)[-1].epoch == later
    ranks.home.clear()
    for name in ALL:
        ranks.tell(name, Deadline(60.0))
    ranks.form("w3", "w2", "w1", "w0")
    ranks.grant(TRIO)
    assert_made(ranks, expected, TRIO)


@pytest.mark.slow  # as a stopped rank; killed leaders are in the first tier
def test_a_stopped_leader_is_left_behind(ranks: Ranks, expected: dict[RolloutId, Tensor]) -> None:
    """Nobody who can speak is asked to: the other commits all the same, and speaks after a while."""
    ranks.form("w0", "w1")
    ranks.grant(TRIO)
    assert_made(ranks, expected, TRIO)
    ranks.home.clear()
    for name in ("w0", "w1"):
        ranks.tell(name, Deadline(2.0))
    epoch = ranks.form("w0", "w1")
    ranks.tell("w0", Mishap("stop", 3))
    lease = ranks.grant(EVALS)
    ranks.stopped("w0")
    ranks.stop("w0", epoch, "w0", "w1")
    await_stop(ranks, "w0", epoch)
    assert safe(ranks, lease) == 3
    ranks.form("w1")
    ranks.grant(EVALS, resume(EVALS, 3))
    assert_made(ranks, expected, EVALS)
    ranks.signal("w0", signal.SIGKILL)
    ranks.gone("w0")


def test_a_lease_abandoned_or_weights_changed_in_a_group(
    ranks: Ranks, expected: dict[RolloutId, Tensor]
) -> None:
    epoch = ranks.form("w0", "w1")
    one = ranks.grant([rollout(8, 50)])
    ranks.until(lambda: safe(ranks, one) >= 2)
    ranks.tell("w0", AbandonLease(WorkerId("w0"), epoch, LeaseId(one)))
    two = ranks.grant([rollout(9, 50)])
    ranks.until(lambda: safe(ranks, two) >= 2)
    # The leader loads the same weights again: its followers may go and do so too, and nothing is lost.
    for name in ("w0", "w1"):
        ranks.tell(name, pull(0, lineage=3, name=name))
    ranks.until(lambda: {e.worker for e in ranks.home.of(WeightsPulled)} == {"w0", "w1"})
    ranks.until(lambda: any(e.seen == two and e.holds == () for e in ranks.home.of(GroupPulled)))
    assert ranks.home.step_of(rollout(9, 50).id, mark_of(0)) == safe(ranks, two)
    ranks.grant(TRIO)
    assert_made(ranks, expected, TRIO)


@pytest.mark.parametrize("short", ["w0", "w1"])
def test_a_group_that_runs_out_of_memory_goes_on_with_half_the_batch(
    ranks: Ranks, expected: dict[RolloutId, Tensor], short: str
) -> None:
    """Whichever member it is, all of them take fewer at once, and no process ends."""
    alive = {name: ranks.processes[name][0].pid for name in ("w0", "w1")}
    ranks.tell(short, Room(2))
    first = ranks.form("w0", "w1")
    ranks.grant(TRIO)
    await_stop(ranks, "w0", first)
    assert not completed(ranks)
    second = ranks.form("w0", "w1")
    ranks.grant(TRIO)
    assert_made(ranks, expected, TRIO)
    capacities = {pulled.epoch: pulled.capacity for pulled in ranks.home.of(GroupPulled)}
    assert capacities[first] > capacities[second] == 1
    assert {name: ranks.processes[name][0].pid for name in alive} == alive
    assert all(ranks.processes[name][0].is_alive() for name in alive)
    ranks.tell(short, Room(99))


@pytest.mark.parametrize("short", ["w0", "w1"])
def test_a_rank_without_memory_for_weights_ends_and_frees_the_other_at_once(
    ranks: Ranks, expected: dict[RolloutId, Tensor], short: str
) -> None:
    """Fewer rollouts would not help: nobody's batch is halved, and what the other holds goes on."""
    (other,) = {"w0", "w1"} - {short}
    ranks.tell(other, Room(BATCH))
    ranks.tell(short, NoRoom("old"))
    epoch = ranks.form("w0", "w1")
    first = ranks.grant(TRIO)
    ranks.until(lambda: safe(ranks, first) >= 2)
    ranks.grant(EVALS)
    ranks.gone(short)
    await_stop(ranks, "w0", epoch)  # long before the deadline of a collective
    ranks.form(other)
    ranks.grant(TRIO, resume(TRIO, safe(ranks, first)))
    assert_made(ranks, expected, TRIO)
    assert max(pulled.capacity for pulled in ranks.home.of(GroupPulled) if pulled.epoch > epoch) == BATCH


def test_ranks_of_different_weights_do_not_take_a_step_together(ranks: Ranks) -> None:
    epoch = ranks.form("w2", "w3")
    ranks.tell("w3", pull(1, lineage=4, name="w3"))
    ranks.until(lambda: ranks.home.of(WeightsPulled) != [])
    lease = ranks.grant(TRIO)
    await_stop(ranks, "w2", epoch)
    assert safe(ranks, lease) == 0
    assert not completed(ranks)
    assert ranks.home.step_of(TRIO[0].id, mark_of(1)) is None
    ranks.tell("w3", pull(0, lineage=5, name="w3"))
    ranks.form("w2", "w3")


def test_a_group_that_cannot_form_is_given_back(ranks: Ranks) -> None:
    ranks.epoch += 1
    ranks.store.set(f"sp/{ranks.epoch}/w0+w1/w1", "here")  # seems to come, and cannot be reached
    ranks.tell("w0", Deadline(1.0))
    ranks.tell("w0", form(ranks.epoch, "w0", "w1"))
    await_stop(ranks, "w0", ranks.epoch)
    assert not ranks.home.of(GroupFormed)
    ranks.home.clear()
    ranks.tell("w0", form(ranks.epoch, "w0", "w1"))  # that answer was lost
    await_stop(ranks, "w0", ranks.epoch)
