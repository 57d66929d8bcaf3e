"""What each machine is to the controller, and which are drained before they end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.config.sections.evaluation import NO_EVALUATION
from spotlight.config.sections.target import TargetConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.queue import PullQueue
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.fleet.fleet_machine import Fleet, FleetMachine, split_machine
from spotlight.scheduler.fleet.make_fleet import make_fleet
from spotlight.scheduler.fleet.rank_places import choose_places
from spotlight.scheduler.fleet.supply import Supply
from spotlight.scheduler.plan import ClusterPlan, FleetSettings, Plan
from spotlight.scheduler.policies.spot_learner.learner_places import LearnerPlaces
from spotlight.scheduler.policies.spot_learner.spot_learner import SpotLearner
from spotlight.scheduler.types import Node, NodeId, NodeKind, PolicyVersion, WorkerId


def node(name: str, kind: NodeKind = NodeKind.RESERVED, gpus: int = 1) -> Node:
    return Node(NodeId(name), kind, gpus, "cpu", 5.0 * gpus, False, True)


def spot(name: str, gpus: int = 1) -> Node:
    return node(name, NodeKind.SPOT, gpus)


def plan_of(ranks: int, fleet: FleetSettings, *, moves: bool = False, least: int | None = None) -> Plan:
    return Plan(
        run_seed=0, iterations=1, prompts_per_iteration=1, group_size=2, rollout_steps=2,
        evaluation=NO_EVALUATION, updates_per_batch=1, micro_batch_size=ranks, checkpoint_every=1,
        lease_s=60.0, max_drop_share=None, ranks=ranks,
        cluster=ClusterPlan(learner_moves=moves, learner_ranks_min=least, drain_margin_s=0.0), fleet=fleet,
    )  # fmt: skip


class World:
    """A fleet that is told of machines, and what it ordered."""

    def __init__(self, plan: Plan) -> None:
        self.cluster = Cluster(plan.cluster, PullQueue(60.0), 0, PolicyVersion(0))
        self.fleet: Fleet = make_fleet(plan, self.cluster)
        self.orders: list[ef.Effect] = []

    def tell(self, *events: ev.Event, now: float = 0.0) -> list[ef.Effect]:
        for event in events:
            self.fleet.now = self.cluster.now = now
            self.fleet.observe(event)
            self.fleet.place()
            self.fleet.check()
        ordered, self.fleet.effects = self.fleet.effects, []
        self.orders += ordered
        return ordered

    def join(self, *nodes: Node) -> tuple[Node, ...]:
        """Returns what the last is to the controller."""
        self.tell(*map(ev.NodeJoined, nodes))
        return self.fleet.machines[nodes[-1].id].parts

    def roles(self, *names: str) -> list[str]:
        """What each machine does, GPU by GPU."""
        words = []
        for name in names:
            parts = self.fleet.machines[NodeId(name)].parts
            does = ("T" if part.trains else "r" if part.rolls_out else "-" for part in parts)
            words.append("".join(what * part.gpus for what, part in zip(does, parts, strict=True)))
        return words

    def supply(self, kind: NodeKind) -> Supply:
        return next(each for each in self.fleet.policies if isinstance(each, Supply) and each.kind is kind)

    @property
    def placed(self) -> Mapping[NodeId, int]:
        """Where the learner was last ordered to be."""
        return next((each.ranks for each in reversed(self.orders) if isinstance(each, ef.PlaceLearner)), {})


def reserved(ranks: int, planned: Mapping[str, int], *, ranks_roll_out: bool = False) -> World:
    names = {NodeId(name): count for name, count in planned.items()}
    return World(plan_of(ranks, FleetSettings(reserved=names, ranks_roll_out=ranks_roll_out)))


def moving(ranks: int, *, even: bool = False, least: int | None = None) -> World:
    return World(plan_of(ranks, FleetSettings(even_ranks=even), moves=True, least=least))


def places_of(world: World) -> LearnerPlaces:
    (policy,) = world.fleet.policies
    assert isinstance(policy, SpotLearner)
    return policy.places


# -- a learner on reserved nodes ------------------------------------------------------------------------


def test_a_machine_with_gpus_left_is_two_nodes_at_the_price_of_one() -> None:
    world = reserved(1, {"r": 1})
    learner, rollout = world.join(node("r", gpus=3))
    assert (learner.id, learner.gpus, learner.trains, learner.rolls_out) == ("r/learner", 1, True, False)
    assert (rollout.id, rollout.gpus, rollout.trains, rollout.rolls_out) == ("r/rollout", 2, False, True)
    assert learner.price_usd_h + rollout.price_usd_h == 15.0
    assert world.orders == [ef.AssignRoles(NodeId("r"), (learner, rollout))]
    assert world.join(spot("s", 2)) == (spot("s", 2),), "it is what it joined as"
    assert len(world.orders) == 1


def test_a_machine_that_returns_under_its_name_and_is_split_this_time_leaves_nothing_behind() -> None:
    world = reserved(1, {"r": 1})
    world.join(node("r"), node("a", gpus=3))
    world.tell(ev.NodeLost(NodeId("r")))
    assert [part.id for part in world.join(node("a", gpus=3))] == ["a/learner", "a/rollout"]
    assert [*world.cluster.hosts] == ["a/learner", "a/rollout"]
    assert world.cluster.recoveries[Recovery.NODE_RETURNED] == 1


def test_gpus_of_ranks_roll_out_too_where_they_are_to() -> None:
    learner, rollout = reserved(2, {"r": 2}, ranks_roll_out=True).join(node("r", gpus=3))
    assert (learner.gpus, learner.trains, learner.rolls_out) == (2, True, True)
    assert (rollout.gpus, rollout.trains, rollout.rolls_out) == (1, False, True)
    unlike = replace(node("r", gpus=3), rolls_out=False)
    assert [part.rolls_out for part in split_machine(unlike, 2, ranks_roll_out=True)] == [False, False]


def test_a_reserved_node_takes_the_ranks_of_one_that_was_lost() -> None:
    world = reserved(2, {"a": 2})
    world.join(node("a", gpus=2))
    (other,) = world.join(node("b", gpus=4))
    assert not other.trains, "all ranks have a place"
    world.tell(ev.NodeLost(NodeId("a")))
    assert world.placed == {}
    (come,) = world.join(spot("s", 2))
    assert not come.trains, "what may vanish does not train"
    assert [part.gpus for part in world.join(node("c", gpus=3))] == [2, 1]
    assert world.placed == {"c": 2}


def test_one_that_is_lost_before_it_joined_leaves_its_ranks_to_the_next() -> None:
    world = reserved(1, {"a": 1})
    world.tell(ev.NodeLost(NodeId("a")), ev.NodeLost(NodeId("never seen")))
    assert [part.trains for part in world.join(node("b"))] == [True]


@given(data=st.data(), wanted=st.integers(1, 4))
@settings(max_examples=60)
def test_never_more_ranks_than_there_are_and_never_on_spot_nodes(data: st.DataObject, wanted: int) -> None:
    world, there = reserved(wanted, {"0": wanted}), list[Node]()
    for number in range(data.draw(st.integers(0, 12))):
        if there and data.draw(st.booleans()):
            lost = data.draw(st.sampled_from(there))
            there.remove(lost)
            world.tell(ev.NodeLost(lost.id))
        else:
            new = node(f"n{number}", data.draw(st.sampled_from(list(NodeKind))), data.draw(st.integers(1, 4)))
            there.append(new)
            parts = world.join(new)
            assert sum(part.price_usd_h for part in parts) == new.price_usd_h
        machines = world.fleet.machines.values()
        assert sum(machine.ranks for machine in machines) <= wanted
        assert not any(machine.ranks for machine in machines if machine.node.kind is not NodeKind.RESERVED)


# -- machines that end ----------------------------------------------------------------------------------


def test_the_earlier_end_of_a_machine_holds_and_a_notice_outlives_a_change_of_mind() -> None:
    world = World(plan_of(1, FleetSettings()))
    world.join(spot("s"))
    machine, host = world.fleet.machines[NodeId("s")], world.cluster.hosts[NodeId("s")]

    def due_s() -> float | None:
        world.fleet.check()
        return host.deadline_s

    world.fleet.give_back(machine, 4000.0)
    assert due_s() == 4000.0
    world.tell(ev.NodeNoticed(NodeId("s"), 30.0))
    assert due_s() == 30.0
    world.fleet.give_back(machine, None)
    assert due_s() == 30.0, "the cloud takes it nevertheless"
    world.fleet.give_back(machine, 0.0)
    world.tell(ev.NoticeCancelled(NodeId("s")))
    assert due_s() == 0.0, "it is given back nevertheless"
    world.fleet.give_back(machine, None)
    assert due_s() is None
    world.fleet.give_back(machine, 0.0)
    world.tell(ev.NodeLost(NodeId("s")), ev.NodeJoined(spot("s")))
    assert world.cluster.hosts[NodeId("s")].deadline_s is None


# -- a learner that moves -------------------------------------------------------------------------------


def test_a_moving_learner_waits_for_room_and_all_nodes_roll_out_until_then() -> None:
    world = moving(2)
    world.join(node("h", gpus=4), spot("a"))
    assert (world.roles("h", "a"), world.orders) == (["rrrr", "r"], [])
    learner, rollout = world.join(spot("b", 3))
    assert (learner.id, rollout.id) == ("b/learner", "b/rollout")
    assert world.roles("h", "a", "b") == ["rrrr", "r", "TTr"]
    assert world.placed == {"b": 2}


def test_a_notice_gives_it_another_place_and_what_it_leaves_rests_or_rolls_out() -> None:
    world, a, c = moving(1), NodeId("a"), NodeId("c")
    world.join(*map(spot, "abc"))
    assert world.placed == {"a": 1}
    world.tell(ev.LearnerStarted({a: 1}))
    placed, roles = world.tell(ev.NodeNoticed(a, 30.0))
    assert placed == ef.PlaceLearner({c: 1})
    assert isinstance(roles, ef.AssignRoles)
    assert world.roles("a", "b", "c") == ["T", "r", "T"], "it works until the other is formed"
    world.tell(ev.LearnerStarted({c: 1}))
    assert world.roles("a", "b", "c") == ["-", "r", "T"]
    world.tell(ev.NoticeCancelled(a))
    assert world.roles("a", "b", "c") == ["r", "r", "T"]
    world.tell(ev.NodeLost(c), ev.LearnerLost("its node is gone"))
    assert world.roles("a", "b") == ["r", "T"]


def test_machines_are_looked_at_only_when_one_of_them_or_the_learner_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers and groups answer a hundred thousand times in a simulated iteration of a thousand GPUs."""
    world, asked = moving(1), list[NodeId]()
    world.join(*map(spot, "abcdefgh"))
    world.tell(ev.LearnerStarted(world.placed))
    assign = Fleet.assign

    def counted(fleet: Fleet, machine: FleetMachine, ranks: int, *, ranks_roll_out: bool) -> None:
        asked.append(machine.node.id)
        assign(fleet, machine, ranks, ranks_roll_out=ranks_roll_out)

    monkeypatch.setattr(Fleet, "assign", counted)
    for number in range(20):
        world.tell(ev.GroupFormed(WorkerId("a/0"), number))
    assert not asked
    world.tell(ev.NodeNoticed(NodeId("a"), 30.0))
    assert sorted(set(asked)) == sorted("abcdefgh")


def test_the_learner_grows_when_there_has_been_room_for_long_enough_and_stays_if_that_fails() -> None:
    world, first = moving(2, least=1), NodeId("a")
    world.join(spot("a"), spot("b"))
    world.tell(ev.LearnerStarted(world.placed))
    (first,) = world.placed
    world.join(spot("c"))
    assert len(world.placed) == 1
    assert world.fleet.next_s == 60.0
    world.tell(ev.TimePassed(), now=59.0)
    assert len(world.placed) == 1
    world.tell(ev.TimePassed(), now=60.0)
    assert first not in world.placed
    assert len(world.placed) == 2
    world.tell(ev.LearnerPrepared(1, formed=False), now=61.0)
    assert world.placed == {first: 1}
    assert world.fleet.next_s == 121.0, "and tries again"


@given(data=st.data(), wanted=st.integers(1, 4), even=st.booleans(), fewer=st.booleans())
@settings(max_examples=100)
def test_places_are_whole_where_there_is_room_and_never_where_the_learner_runs(
    data: st.DataObject, wanted: int, even: bool, fewer: bool
) -> None:
    sizes = [size for size in (1, 2, 3, 4) if wanted % size == 0]
    least = data.draw(st.sampled_from(sizes)) if fewer else wanted
    world, there = moving(wanted, even=even, least=least), dict[NodeId, int]()
    places = places_of(world)
    steps = ["join", "join", "lose", "notice", "cancel", "lost", "started", "grow", "failed", "hold"]
    for number in range(data.draw(st.integers(1, 14))):
        what = data.draw(st.sampled_from(steps))
        name = data.draw(st.sampled_from(sorted(there))) if there else None
        if what == "join":
            new = spot(f"n{number}", data.draw(st.integers(1, 4)))
            there[new.id] = new.gpus
            world.tell(ev.NodeJoined(new))
        elif what == "lost":
            world.tell(ev.LearnerLost("killed"))
        elif what == "started" and places.target:
            world.tell(ev.LearnerStarted(dict(places.target)))
        elif what == "grow":
            world.tell(ev.TimePassed(), now=100.0 * number)
        elif what == "failed":
            world.tell(ev.LearnerPrepared(1, formed=False))
        elif name is not None:
            match what:
                case "lose":
                    del there[name]
                    world.tell(ev.NodeLost(name))
                case "notice":
                    world.tell(ev.NodeNoticed(name, 1e6))
                case "cancel":
                    world.tell(ev.NoticeCancelled(name))
                case "hold":
                    places.hold(name)
        target = places.target
        assert world.placed == target
        assert sum(target.values()) in (0, *(size for size in sizes if size >= least))
        assert all(0 < count <= there[each] for each, count in target.items())
        assert not even or len(set(target.values())) <= 1
        assert target == places.running or not set(target) & set(places.running)
        free = {each: gpus for each, gpus in there.items() if each not in places.leaving}
        assert target or places.running or not choose_places(free, least, even=even)
        assert all(world.fleet.machines[each].ranks == places.held(each) for each in there)


# -- nodes that come and go as the run wants ------------------------------------------------------------


def scaled(*nodes: Node, moves: bool = False) -> World:
    """A run with a goal; each test says what is wanted in its policy's place."""
    target = TargetConfig(deadline_h=1000, nodes_min=0)
    fleet = FleetSettings(target=target, move_s=7.0, drain_s=3.0)
    world = World(plan_of(1, fleet, moves=moves))
    world.join(*nodes)
    world.tell(ev.NodesProvided(NodeKind.SPOT, len(nodes)))
    return world


def want(world: World, nodes: int, now: float = 0.0) -> list[ef.Effect]:
    supply = world.supply(NodeKind.SPOT)
    supply.wanted, supply.watches = nodes, True
    return world.tell(ev.TimePassed(), now=now)


def ends_s(world: World) -> dict[str, float]:
    machines = world.fleet.machines.values()
    return {machine.node.id: machine.returned_s for machine in machines if machine.returned_s is not None}


def test_nodes_are_drained_before_they_end_the_newest_first_and_no_more_than_are_too_many() -> None:
    world = scaled(*map(spot, "abcd"))
    assert world.orders == [ef.NodesWanted(NodeKind.SPOT, 4)]
    assert want(world, 2) == [ef.NodesWanted(NodeKind.SPOT, 2, (NodeId("c"), NodeId("d")))], "they were empty"
    assert ends_s(world) == {"c": 0.0, "d": 0.0}
    assert want(world, 3) == [ef.NodesWanted(NodeKind.SPOT, 3, (NodeId("c"),))]
    assert ends_s(world) == {"c": 0.0}
    assert world.tell(ev.NodeLost(NodeId("c"))) == [ef.NodesWanted(NodeKind.SPOT, 3)]
    assert ends_s(world) == {}


def test_nodes_that_the_cloud_may_take_soon_end_first() -> None:
    world = scaled(*map(spot, "abcd"))
    assert world.tell(ev.NodeAdvised(NodeId("b"))) == []
    assert want(world, 2) == [ef.NodesWanted(NodeKind.SPOT, 2, (NodeId("d"), NodeId("b")))]


def test_the_learner_takes_nodes_that_the_cloud_will_not_take_soon_and_does_not_move_for_that() -> None:
    world = moving(1)
    world.join(spot("a"))
    assert world.placed == {"a": 1}
    world.join(spot("b"), spot("c"))
    for name in "ac":
        world.tell(ev.NodeAdvised(NodeId(name)))
    assert world.placed == {"a": 1}
    world.tell(ev.NodeNoticed(NodeId("a"), 60.0))
    assert world.placed == {"b": 1}


def test_a_node_that_does_not_empty_may_end_nevertheless() -> None:
    world = scaled(*map(spot, "ab"))
    (name,) = world.cluster.hosts[NodeId("b")].workers
    epoch = world.cluster.workers[name].epoch
    for event in (ev.WorkerStarted(name, epoch), ev.WeightsPulled(name, epoch, PolicyVersion(0), 0)):
        world.cluster.handle(event)
    assert world.cluster.hosts[NodeId("b")].leaders, "it forms a group"
    assert want(world, 1) == [], "it works"
    assert world.fleet.next_s == 3.0
    assert world.tell(ev.TimePassed(), now=3.0) == [ef.NodesWanted(NodeKind.SPOT, 1, (NodeId("b"),))]


def test_a_node_that_returns_while_it_is_drained_is_drained_like_any_other() -> None:
    world = scaled(*map(spot, "ab"))
    (name,) = world.cluster.hosts[NodeId("b")].workers
    epoch = world.cluster.workers[name].epoch
    for event in (ev.WorkerStarted(name, epoch), ev.WeightsPulled(name, epoch, PolicyVersion(0), 0)):
        world.cluster.handle(event)
    assert want(world, 1) == [], "it works"
    world.tell(ev.NodeJoined(spot("b")), now=1.0)
    assert ends_s(world) == {"b": 1.0}, "nothing begins there that would not be done in time"


def test_a_node_that_holds_the_learner_is_the_last_and_has_the_time_that_a_move_takes() -> None:
    world = scaled(*map(spot, "ab"), moves=True)
    (holder,) = world.placed
    world.tell(ev.LearnerStarted(world.placed))
    want(world, 1)
    (first,) = ends_s(world)
    assert first != holder
    want(world, 0)
    assert ends_s(world) == {first: 0.0, holder: 7.0}
    world.tell(ev.LearnerLost("killed"), now=1.0)
    assert ends_s(world)[holder] in (1.0, 7.0)
