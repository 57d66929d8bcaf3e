"""A learner of fewer ranks than wished: which, when it moves to more, and what each of them trains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.config.load import load_config
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.queue import PullQueue
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.fleet.fleet_machine import Fleet
from spotlight.scheduler.iteration import Snapshot
from spotlight.scheduler.learner.learner_life import LearnerLife
from spotlight.scheduler.ledger import Ledger
from spotlight.scheduler.plan import ClusterPlan
from spotlight.scheduler.policies.spot_learner.learner_places import LearnerPlaces
from spotlight.scheduler.types import MicroBatch, Node, NodeId, NodeKind, PolicyVersion, RolloutId
from spotlight.training.batching.redistribute import passes_of, share_of
from spotlight_rewards.base.errors import ConfigError

STATE = Snapshot(0, PolicyVersion(0), 0, Ledger().snapshot(), {})


def places_of(*slots: int, ranks: int = 4, least: int = 1) -> LearnerPlaces:
    """Nodes ``a``, ``b``, ... with a learner that has just lost its processes, if it had any."""
    places = LearnerPlaces(ranks, ranks_min=least)
    for name, count in zip("abcdef", slots, strict=False):
        places.join(name, count)
    places.target = {}
    places.lost()
    return places


@pytest.mark.parametrize(
    ("slots", "least", "ranks"),
    [
        ((1, 1, 1, 1, 1), 1, 4),
        ((1, 1, 1, 1), 1, 2),  # one must roll out, and three ranks share no batch
        ((2, 1), 1, 2),
        ((1, 1), 2, 2),  # as few as allowed take the last slots
        ((1,), 2, 0),
        ((8,), 1, 4),
    ],
)
def test_it_is_formed_with_the_most_ranks_that_leave_a_slot_to_roll_out(
    slots: tuple[int, ...], least: int, ranks: int
) -> None:
    assert sum(places_of(*slots, least=least).target.values()) == ranks


def test_it_grows_beside_itself_and_only_when_it_is_told_to() -> None:
    places = places_of(1, 1, ranks=2)
    places.started(places.target)
    (first,) = places.running
    assert not places.larger
    places.join("c", 1)
    assert places.target == places.running, "not at once: the node may be gone again"
    assert sum(places.larger.values()) == 2
    assert first not in places.larger
    places.grow()
    assert sum(places.target.values()) == 2
    assert not places.larger, "it is on its way"
    places.started(places.target)
    assert places.held(first) == 0, "it rolls out again"


def test_a_larger_one_that_cannot_be_formed_gives_its_nodes_back() -> None:
    places = places_of(1, 1, 1, ranks=2)
    places.target = {"a": 1}
    places.started({"a": 1})
    places.grow()
    assert set(places.target) == {"b", "c"}
    places.stay()
    assert places.target == {"a": 1}
    places.grow()
    places.notice("b")
    assert places.target == {"a": 1}, "the one that runs goes on"
    assert not places.larger


def node(name: str) -> Node:
    return Node(NodeId(name), NodeKind.SPOT, 1, "H100", 1.0, True, False)


def test_the_controller_forms_the_larger_one_and_takes_it_when_nothing_is_unsaved() -> None:
    cluster = Cluster(ClusterPlan(learner_moves=True, learner_ranks_min=1), PullQueue(60.0), 0, STATE.version)
    fleet = Fleet(cluster)
    life = LearnerLife(2, fleet, STATE, 1)
    life.observe(ev.RunStarted(1))

    def tell(event: ev.NodeJoined | ev.NodeLost) -> None:
        life.observe(event)
        fleet.observe(event)
        fleet.place()

    tell(ev.NodeJoined(node("a")))
    assert list(life.placed(1, idle=True)) == [], "it runs there"
    tell(ev.NodeJoined(node("b")))
    tell(ev.NodeJoined(node("c")))
    assert list(life.placed(1, idle=True)) == [ef.PrepareLearner(1)]
    life.observe(ev.LearnerPrepared(1))
    assert list(life.placed(1, idle=False)) == []
    life.saving = STATE
    assert list(life.placed(1, idle=True)) == [], "its last step is not durable"
    life.saved()
    assert list(life.placed(1, idle=True)) == [ef.RestoreLearner(1, 0)]
    life.observe(ev.LearnerRestored(0, 2))
    assert (life.ranks, cluster.recoveries[Recovery.LEARNER_RESIZED]) == (2, 1)
    tell(ev.NodeLost(NodeId("a")))
    assert list(life.placed(1, idle=True)) == []


def test_a_lost_learner_is_restored_with_as_few_ranks_as_allowed() -> None:
    cluster = Cluster(ClusterPlan(learner_moves=True, learner_ranks_min=1), PullQueue(60.0), 0, STATE.version)
    life = LearnerLife(2, Fleet(cluster), STATE, 1)
    life.lost()
    assert list(life.placed(1, idle=True)) == []
    cluster.join(node("a"))
    assert list(life.placed(1, idle=True)) == [ef.RestoreLearner(1, 0)]


@given(planned=st.sampled_from([1, 2, 4, 6]), each=st.integers(1, 3), data=st.data())
def test_fewer_ranks_train_every_sample_once_and_no_more_at_a_time(
    planned: int, each: int, data: st.DataObject
) -> None:
    world = data.draw(st.sampled_from([size for size in range(1, planned + 1) if planned % size == 0]))
    names = tuple(RolloutId(str(number)) for number in range(planned * each))
    batch = MicroBatch(0, 0, names, len(names))
    passes = passes_of(batch, world, planned)
    assert [name for one in passes for name in one.rollouts] == list(names)
    assert {len(one.rollouts) for one in passes} == {world * each}
    effect = ef.PrepareBatch(0, (), {}, (batch,))
    shares = [share_of(effect, rank, world, planned) for rank in range(world)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert {len(share) for share in shares} == {len(names) // world}


MOVES = ("fleet.driver=ray", "fleet.learner_placement=spot", "fleet.spot.nodes=3", "fleet.learner_ranks=4")


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        ([*MOVES, "fleet.learner_ranks_min=3"], "fleet.learner_ranks_min", "Nearest: 2 or 4"),
        (
            ["fleet.driver=ray", "fleet.learner_ranks_min=1"],
            "fleet.learner_ranks_min",
            "Set fleet.learner_placement=spot",
        ),
        (
            [*MOVES, "fleet.learner_grows_after_s=5"],
            "fleet.learner_grows_after_s",
            "number of ranks is fixed",
        ),
        (
            [*MOVES, "fleet.learner_ranks_min=1", "algorithm.name=dgpo"],
            "fleet.learner_ranks_min",
            "leave it out",
        ),
    ],
)
def test_numbers_of_ranks_that_do_not_go_together_are_refused(
    overrides: list[str], key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert any(problem.key == key and remedy in str(problem) for problem in caught.value.problems)
