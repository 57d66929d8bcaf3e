"""Which of Ray's nodes are what to the controller: ranks are placed once each, and again after a loss."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.cluster.nodes.listing import RayNode, train_only
from spotlight.cluster.nodes.node_prices import Fleet, Prices
from spotlight.scheduler.learner.learner_places import choose_places
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight_rewards.base.errors import ConfigError

PRICES = Prices(reserved_usd_h=5.0, spot_usd_h=1.0)


def node(name: str, kind: NodeKind = NodeKind.RESERVED, slots: int = 1) -> RayNode:
    return RayNode(name * 8, name, kind, slots, False, "cpu", "10.0.0.1", 1, "/tmp/ray/s")


def join(fleet: Fleet, new: RayNode) -> tuple[Node, ...]:
    return tuple(part.node for part in fleet.join(new))


def ranks(fleet: Fleet) -> int:
    return sum(count for _, count in fleet.learner_slots.values())


def test_spot_nodes_roll_out_at_their_price() -> None:
    fleet = Fleet.plan(1, PRICES, [node("r")])
    (spot,) = join(fleet, node("s", NodeKind.SPOT, 2))
    assert (spot.id, spot.gpus, spot.trains, spot.rolls_out) == ("s", 2, False, True)
    assert spot.price_usd_h == 2.0


def test_a_node_with_slots_left_is_two() -> None:
    reserved = node("r", slots=3)
    fleet = Fleet.plan(1, PRICES, [reserved])
    learner, rollout = join(fleet, reserved)
    assert (learner.id, learner.gpus, learner.trains, learner.rolls_out) == ("r/learner", 1, True, False)
    assert (rollout.id, rollout.gpus, rollout.trains, rollout.rolls_out) == ("r/rollout", 2, False, True)
    assert learner.price_usd_h + rollout.price_usd_h == 15.0
    assert fleet.host_of(NodeId("r/rollout")) is reserved
    assert fleet.known(reserved.ray_id) == ("r/learner", "r/rollout") == fleet.lose(reserved.ray_id)
    assert fleet.known(reserved.ray_id) == ()
    assert fleet.host_of(NodeId("r/rollout")) is None


def test_slots_of_ranks_roll_out_too_where_they_are_to() -> None:
    """A rank and the worker beside it have the same slot: those of a node are counted once."""
    reserved = node("r", slots=3)
    fleet = Fleet.plan(2, PRICES, [reserved], ranks_roll_out=True)
    learner, rollout = fleet.join(reserved)
    assert (learner.node.gpus, learner.node.trains, learner.node.rolls_out) == (2, True, True)
    assert (rollout.node.gpus, rollout.node.trains, rollout.node.rolls_out) == (1, False, True)
    assert (learner.first_slot, rollout.first_slot) == (0, 2)
    assert learner.node.price_usd_h + rollout.node.price_usd_h == 15.0
    (alone,) = join(Fleet.plan(2, PRICES, [node("a", slots=2)], ranks_roll_out=True), node("a", slots=2))
    assert (alone.id, alone.trains, alone.rolls_out) == ("a", True, True)
    train_alone = train_only(learner)
    assert (train_alone.node.trains, train_alone.node.rolls_out) == (True, False)


def test_ranks_have_a_place_before_their_node_has_joined() -> None:
    fleet = Fleet.plan(2, PRICES, [node("r", slots=2), node("s", NodeKind.SPOT, 4)])
    assert fleet.learner_slots == {"r" * 8: (node("r", slots=2), 2)}


def test_too_few_reserved_slots_are_refused() -> None:
    with pytest.raises(ConfigError):
        Fleet.plan(3, PRICES, [node("r", slots=2), node("s", NodeKind.SPOT, 8)])


def test_a_reserved_node_takes_the_ranks_of_one_that_was_lost() -> None:
    fleet = Fleet.plan(2, PRICES, [node("a", slots=2)])
    fleet.join(node("a", slots=2))
    (other,) = join(fleet, node("b", slots=4))
    assert not other.trains, "all ranks have a place"
    fleet.lose("a" * 8)
    assert ranks(fleet) == 0
    (spot,) = join(fleet, node("s", NodeKind.SPOT, 2))
    assert not spot.trains, "what may vanish does not train"
    learner, rollout = join(fleet, node("c", slots=3))
    assert (learner.gpus, rollout.gpus) == (2, 1)
    assert ranks(fleet) == 2


def test_one_that_is_lost_before_it_joined_leaves_its_ranks_to_the_next() -> None:
    fleet = Fleet.plan(1, PRICES, [node("a")])
    assert fleet.lose("a" * 8) == ()
    assert fleet.learner_slots == {}
    assert [part.trains for part in join(fleet, node("b"))] == [True]


def test_a_node_nobody_knows_is_lost_quietly() -> None:
    fleet = Fleet.plan(1, PRICES, [node("a")])
    assert fleet.lose("never seen") == ()
    assert fleet.known("never seen") == ()


@given(data=st.data(), wanted=st.integers(1, 4))
@settings(max_examples=60)
def test_never_more_ranks_than_there_are_and_never_on_spot_nodes(data: st.DataObject, wanted: int) -> None:
    kinds = st.sampled_from(list(NodeKind))
    fleet = Fleet.plan(wanted, PRICES, [node("0", slots=wanted)])
    there: dict[str, RayNode] = {}
    for number in range(data.draw(st.integers(0, 12))):
        if there and data.draw(st.booleans()):
            fleet.lose(there.pop(data.draw(st.sampled_from(sorted(there)))).ray_id)
        else:
            new = node(f"n{number}", data.draw(kinds), data.draw(st.integers(1, 4)))
            parts = join(fleet, new)
            there[new.name] = new
            assert sum(part.gpus for part in parts) == new.slots
            assert sum(part.price_usd_h for part in parts) == new.slots * PRICES.of(new.kind)
        assert ranks(fleet) <= wanted
        assert all(host.kind is NodeKind.RESERVED for host, _ in fleet.learner_slots.values())
        names = [name for each in there.values() for name in fleet.known(each.ray_id)]
        assert len(names) == len(set(names))


# -- a learner that moves -----------------------------------------------------------------------------------


def spot(name: str, slots: int = 1) -> RayNode:
    return node(name, NodeKind.SPOT, slots)


def roles(fleet: Fleet, *names: str) -> list[str]:
    """What each node does to the controller, slot by slot."""
    words = []
    for name in names:
        parts = [part.node for part in fleet._nodes[name * 8][1]]
        does = ("T" if part.trains else "r" if part.rolls_out else "-" for part in parts)
        words.append("".join(what * part.gpus for what, part in zip(does, parts, strict=True)))
    return words


def test_a_moving_learner_waits_for_room_and_all_nodes_roll_out_until_then() -> None:
    fleet = Fleet.on_spot(2, PRICES)
    fleet.join(node("h", slots=4))
    fleet.join(spot("a"))
    assert fleet.changes() == []
    assert (roles(fleet, "h", "a"), fleet.learner_slots) == (["rrrr", "r"], {})
    (learner, rollout) = fleet.join(spot("b", 3))
    assert (learner.node.id, rollout.node.id) == ("b/learner", "b/rollout")
    assert roles(fleet, "h", "a", "b") == ["rrrr", "r", "TTr"]
    assert fleet.changes() == []


def test_a_notice_gives_it_another_place_and_what_it_leaves_rests_or_rolls_out() -> None:
    fleet = Fleet.on_spot(1, PRICES)
    assert fleet.places is not None
    for name in "abc":
        fleet.join(spot(name))
    fleet.places.started({"a" * 8: 1})
    fleet.places.notice("a" * 8)
    (change,) = fleet.changes()
    assert (change.before, [part.node.trains for part in change.after]) == (("c",), [True])
    assert roles(fleet, "a", "b", "c") == ["T", "r", "T"], "it works until the other is formed"
    fleet.places.started({"c" * 8: 1})
    fleet.changes()
    assert roles(fleet, "a", "b", "c") == ["-", "r", "T"]
    fleet.places.cancel("a" * 8)
    fleet.changes()
    assert roles(fleet, "a", "b", "c") == ["r", "r", "T"]
    fleet.lose("c" * 8)
    fleet.changes()
    assert roles(fleet, "a", "b") == ["r", "T"]


@given(data=st.data(), wanted=st.integers(1, 4), even=st.booleans(), fewer=st.booleans())
@settings(max_examples=60)
def test_places_are_whole_where_there_is_room_and_never_where_the_learner_runs(
    data: st.DataObject, wanted: int, even: bool, fewer: bool
) -> None:
    sizes = [size for size in (1, 2, 3, 4) if wanted % size == 0]
    least = data.draw(st.sampled_from(sizes)) if fewer else wanted
    fleet = Fleet.on_spot(wanted, PRICES, even=even, ranks_min=least)
    places = fleet.places
    assert places is not None
    there: dict[str, RayNode] = {}
    for number in range(data.draw(st.integers(1, 14))):
        what = data.draw(
            st.sampled_from(
                ["join", "join", "lose", "notice", "cancel", "lost", "started", "grow", "stay", "hold"]
            )
        )
        name = data.draw(st.sampled_from(sorted(there))) if there else None
        if what == "join":
            new = spot(f"n{number}", data.draw(st.integers(1, 4)))
            there[new.ray_id] = new
            fleet.join(new)
        elif what == "lost":
            places.lost()
        elif what == "started" and places.target:
            places.started(dict(places.target))
        elif what in ("grow", "stay"):
            getattr(places, what)()
        elif what in ("lose", "notice", "cancel", "hold") and name is not None:
            if what == "lose":
                fleet.lose(there.pop(name).ray_id)
            else:
                getattr(places, what)(name)
        fleet.changes()
        target = places.target
        assert sum(target.values()) in (0, *(size for size in sizes if size >= least))
        assert all(0 < count <= there[ray_id].slots for ray_id, count in target.items())
        assert not even or len(set(target.values())) <= 1
        assert target == places.running or not set(target) & set(places.running)
        free = {key: each.slots for key, each in there.items() if key not in places.leaving}
        assert target or places.running or not choose_places(free, least, even=even)
        for ray_id, each in there.items():
            parts = [part.node for part in fleet._nodes[ray_id][1]]
            assert sum(part.gpus for part in parts) == each.slots
            assert sum(part.gpus for part in parts if part.trains) == places.held(ray_id)
