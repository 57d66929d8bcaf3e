"""Workers kept for the learner: never more than it has ranks, none that it does not take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spotlight.cluster.learner.spare_workers import SpareWorkers
from spotlight.scheduler.policies.spot_learner.learner_places import LearnerPlaces


@dataclass(frozen=True)
class Process:
    ray_id: str
    number: int
    actor: Any = None


@dataclass
class Keeping:
    """Nodes that change roles, and what becomes of their workers; ``a`` and ``b`` are places at first."""

    places: dict[str, int] = field(default_factory=lambda: {"a": 2, "b": 1})
    ended: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spares = SpareWorkers(self.ended.append, lambda: self.places)

    def change(self, node: str, able: int, unfit: int = 0) -> None:
        processes = [Process(node, number) for number in range(able + unfit)]
        self.spares.release(node, processes[:able], processes[able:])

    def take(self, *nodes: str) -> dict[str, list[Any]]:
        return asyncio.run(asyncio.wait_for(self.spares.take(nodes), 5.0))


def test_as_many_are_kept_as_the_node_has_ranks_and_the_learner_takes_them_once() -> None:
    it = Keeping()
    it.change("a", able=3, unfit=1)
    it.change("c", able=1)
    assert it.ended == [Process("a", 2), Process("a", 3), Process("c", 0)]
    assert it.take("a", "b") == {"a": [Process("a", 0), Process("a", 1)]}
    assert it.take("a", "b") == {}


def test_a_worker_whose_node_is_no_place_any_more_is_ended() -> None:
    it = Keeping()
    it.change("a", able=1)
    del it.places["a"]
    it.spares.prune()
    assert it.ended == [Process("a", 0)]
    assert it.take("a") == {}


def test_a_node_that_was_given_another_role_twice_keeps_no_more_than_its_ranks() -> None:
    it = Keeping()
    it.change("a", able=2)
    it.places["a"] = 1
    it.change("a", able=1)
    assert it.ended == [Process("a", 1), Process("a", 0)]
    assert it.take("a") == {"a": [Process("a", 0)]}


def test_none_is_kept_for_a_learner_that_has_started() -> None:
    it = Keeping()
    assert it.take("a") == {}
    it.change("a", able=1)
    assert it.ended == [Process("a", 0)], "it would occupy the slot that a new process waits for"


def test_what_is_kept_is_ended_when_it_is_closed() -> None:
    it = Keeping()
    it.change("a", able=1)
    it.spares.close()
    assert it.ended == [Process("a", 0)]
    assert it.take("b") == {}
    it.change("b", able=1)
    assert it.ended == [Process("a", 0), Process("b", 0)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from("abc"), st.integers(0, 3)),
        st.tuples(st.just("places"), st.sets(st.sampled_from("abc"))),
        st.tuples(st.just("take"), st.just("")),
    ),
    max_size=30,
)


@given(STEPS)
def test_every_process_is_ended_or_taken_and_no_slot_is_held_for_nobody(steps: list[Any]) -> None:
    it, all_of, taken = Keeping(), list[Process](), list[Any]()
    for what, argument, *more in steps:
        if what == "change":
            processes = [Process(argument, len(all_of) + number) for number in range(*more)]
            all_of += processes
            it.spares.release(argument, processes, [])
        elif what == "places":
            it.places = dict.fromkeys(argument, 2)
            it.spares.prune()
        elif what == "take":
            taken += [process for kept in it.take(*it.places).values() for process in kept]
        kept = [process for process in all_of if process not in it.ended and process not in taken]
        assert all(process.ray_id in it.places for process in kept)
    it.spares.close()
    assert sorted(all_of, key=lambda each: each.number) == sorted(
        (*it.ended, *taken), key=lambda each: each.number
    )


def test_the_learner_goes_where_workers_hold_the_base_weights() -> None:
    places = LearnerPlaces(1, 1)
    for node in ("a", "b", "c"):
        places.join(node, 1)
    places.started(places.target)
    assert places.running == {"a": 1}
    places.hold("b")
    places.notice("a")
    assert places.target == {"b": 1}, "the newest is c, but its workers have no weights yet"
    places.started(places.target)
    places.lose("a")
    places.notice("b")
    assert places.target == {"c": 1}, "there is no other"
