"""When a learner on spot nodes takes a node on demand and gives it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fleet import World, node, plan_of, spot

from spotlight.config.load import build_config
from spotlight.config.sections.fleet import OnDemandConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.plan import FleetSettings
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight_rewards.base.errors import ConfigError

AFTER_S, BACK_AFTER_S, START_S = 5.0, 4.0, 8.0
DAYS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=8)
"""So many spot nodes for so many seconds, again and again."""


def dear(name: str, gpus: int = 1) -> Node:
    return node(name, NodeKind.ON_DEMAND, gpus)


class Days(World):
    """One rank, spot nodes that come and go, and a provider of nodes on demand; a step is a second."""

    def __init__(self, delay_s: int | None, *, ranks: int = 1, fails: bool = False, gpus: int = 1) -> None:
        on_demand = OnDemandConfig(after_s=AFTER_S, back_after_s=BACK_AFTER_S)
        plan = plan_of(ranks, FleetSettings(on_demand=on_demand, move_s=START_S), moves=True)
        super().__init__(plan)
        self.fleet.policies[1]._start_s = START_S  # type: ignore[attr-defined]
        self.delay_s, self.fails, self.gpus = delay_s, fails, gpus
        self.now_s, self.made, self.waited_s, self.roomy_s = 0, 0, 0, 0
        self.coming: tuple[str, int] | None = None
        self.taken = 0
        self.reasons: list[str] = []
        self.step_with(ev.NodesProvided(NodeKind.ON_DEMAND, 0))

    @property
    def there(self) -> list[NodeId]:
        return [machine.node.id for machine in self.fleet.kind(NodeKind.ON_DEMAND)]

    def step_with(self, *events: ev.Event) -> None:
        for effect in self.tell(*events, now=float(self.now_s)):
            match effect:
                case ef.ReportFleet(NodeKind.ON_DEMAND, text):
                    self.reasons.append(text.partition(":")[0])
                case ef.NodesWanted(NodeKind.ON_DEMAND, nodes, ending):
                    self.provide(nodes, ending)

    def provide(self, nodes: int, ending: tuple[NodeId, ...]) -> None:
        for name in ending:
            assert not self.fleet.machines[name].ranks
            self.step_with(ev.NodeLost(name))
        if not nodes:
            self.coming = None
        elif not self.there and self.coming is None:
            self.taken += 1
            if self.fails:
                self.step_with(ev.NodesProvided(NodeKind.ON_DEMAND, 0, 1))
            else:
                self.coming = f"on-demand-{self.taken}", self.now_s

    def step(self, spots: int) -> None:
        have = [machine.node.id for machine in self.fleet.kind(NodeKind.SPOT)]
        for name in have[spots:]:
            self.step_with(ev.NodeLost(name))
        for _ in range(spots - len(have)):
            self.made += 1
            self.step_with(ev.NodeJoined(spot(f"spot-{self.made}")))
        if (
            self.coming is not None
            and self.delay_s is not None
            and self.now_s >= self.coming[1] + self.delay_s
        ):
            name, self.coming = self.coming[0], None
            self.step_with(ev.NodeJoined(dear(name, self.gpus)))
        self.step_with(ev.TimePassed())
        if self.placed:
            self.step_with(ev.LearnerStarted(self.placed))
        self.waited_s = 0 if self.placed else self.waited_s + 1
        self.roomy_s = self.roomy_s + 1 if spots else 0
        self.now_s += 1


@given(days=DAYS, delay_s=st.sampled_from([0, 1, 3, 7, None]))
def test_it_neither_waits_nor_pays_for_long(days: list[tuple[int, int]], delay_s: int | None) -> None:
    world = Days(delay_s)
    for spots, seconds in days:
        for _ in range(seconds):
            world.step(spots)
            assert len(world.there) + (world.coming is not None) <= 1
            if delay_s is not None:
                assert world.waited_s <= AFTER_S + delay_s + 1
            if world.roomy_s > BACK_AFTER_S + START_S + 3:
                assert (world.coming, world.there) == (None, [])


def test_short_waits_cost_nothing() -> None:
    world = Days(delay_s=1)
    for _ in range(20):
        for spots in (1, 0, 0, 0):
            world.step(spots)
    assert (world.taken, world.reasons) == (0, [])


def test_a_learner_whose_spot_nodes_are_gone_again_stays() -> None:
    world = Days(delay_s=0)
    while not world.there:
        world.step(0)
    (there,) = world.there
    world.tell(ev.NodeJoined(spot("s")), now=100.0)
    assert world.placed == {there: 1}, "a learner that runs does not move by itself"
    assert world.fleet.next_s == 104.0
    world.now_s = 104
    world.step_with(ev.TimePassed())
    assert world.placed == {"s": 1}
    world.step_with(ev.NodeLost(NodeId("s")))
    assert (world.placed, world.there) == ({there: 1}, [there])
    assert world.fleet.machines[there].ends_s is None
    assert world.reasons == ["take", "leave", "stay"]


def test_a_start_that_fails_is_given_up_and_not_tried_again_at_once() -> None:
    world = Days(delay_s=0, fails=True)
    for _ in range(60):
        world.step(0)
    assert (world.taken, world.reasons) == (1, ["take", "cancel"])
    for _ in range(20):
        world.step(0)
    assert world.reasons == ["take", "cancel"] * 2


def test_a_node_that_is_too_small_is_given_back() -> None:
    world = Days(delay_s=0, ranks=2)
    for _ in range(20):
        world.step(0)
    assert (world.there, world.taken) == ([], 1)
    assert world.reasons == ["take", "cancel"]


def test_one_that_a_killed_head_had_taken_is_used_or_given_up() -> None:
    for comes in (True, False):
        world = Days(delay_s=None)
        world.supply(NodeKind.ON_DEMAND).wanted = None
        world.step_with(ev.NodesProvided(NodeKind.ON_DEMAND, 1))
        assert world.supply(NodeKind.ON_DEMAND).wanted == 1
        if comes:
            world.step_with(ev.NodeJoined(dear("older")))
            assert world.placed == {"older": 1}
        else:
            for _ in range(int(START_S) + 1):
                world.step(1)
            assert world.reasons == ["cancel"]
            assert world.orders[-1] == ef.NodesWanted(NodeKind.ON_DEMAND, 0) or world.coming is None


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        ({"on_demand": {"after_s": 9}}, "fleet.on_demand", "Set fleet.learner_placement=spot_then_on_demand"),
        ({"learner_placement": "spot_then_on_demand", "on_demand": {"stop": "true"}}, "fleet.on_demand.stop",
         "leave it out"),
        ({"learner_placement": "spot_then_on_demand", "address": "auto"}, "fleet.on_demand.start",
         "Give the shell command of your cloud"),
    ],
)  # fmt: skip
def test_keys_that_do_not_go_together_are_refused(changes: dict[str, object], key: str, remedy: str) -> None:
    fleet = {"driver": "ray"} | ({} if "address" in changes else {"spot": {"nodes": 3}}) | changes
    with pytest.raises(ConfigError, match=rf"{key}: found.*{remedy}"):
        build_config({"fleet": fleet, "learner": {"mode": "lora"}}, "the test")
