"""What is decided reaches the provider, whatever fails meanwhile: nodes are drained before they end, and what
could not be done is done later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.scaling import spot_scaler
from spotlight.cluster.scaling.node_provider import ProviderError
from spotlight.cluster.scaling.spot_scaler import ScalerLimits, SpotScaler, Workforce
from spotlight.scheduler.scaling.iteration_model import MeasuredIteration
from spotlight.scheduler.scaling.measured_rows import decision_row, iteration_row, measured_before
from spotlight.scheduler.scaling.pace_meter import PaceMeter
from spotlight.scheduler.scaling.target_policy import TargetPolicy
from spotlight.scheduler.types import NodeKind, Phase


@dataclass
class Fleet:
    """A provider, the nodes that it provides, and what the scaler says of them."""

    nodes: list[RayNode] = field(default_factory=list)
    learner_on: str = ""
    fails: str = ""
    level: int = 2
    made: int = 0
    asked_for: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    closed: bool = False
    ends: dict[str, float] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    takes_s: float = 0.0
    at_once: int = 100
    joined: bool = True
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.provide()

    def provide(self) -> None:
        while len(self.nodes) < self.level:
            self.made += 1
            name = f"spot-{self.made}"
            self.nodes.append(RayNode(f"ray-{name}", name, NodeKind.SPOT, 1, False, "cpu", "10.0.0.1", 1, ""))

    # -- the provider ----------------------------------------------------------------------------------

    def asked(self, present: Sequence[RayNode]) -> int:
        self.require()
        return self.level

    def ask(self, nodes: int, present: Sequence[RayNode], leaving: Sequence[RayNode]) -> int:
        self.asked_for.append((nodes, tuple(node.name for node in leaving)))
        self.calls.append("ask")
        time.sleep(self.takes_s)
        self.calls.append("asked")
        self.require()
        nodes = min(nodes, max(self.level, len(self.nodes)) + self.at_once)
        ending = [node for node in self.nodes if node in leaving][: max(0, len(self.nodes) - nodes)]
        self.nodes = [node for node in self.nodes if node not in ending]
        self.level = max(nodes, len(self.nodes))
        self.provide()
        return self.level

    def close(self) -> None:
        self.closed = True
        self.calls.append("close")
        self.require()

    def require(self) -> None:
        if self.fails:
            raise ProviderError(self.fails)

    # -- the run ---------------------------------------------------------------------------------------

    def workforce(self) -> Workforce:
        working = [node for node in self.nodes if node.name not in self.ends]
        present = list(self.nodes) if self.joined else []
        return Workforce(len(working), len(working), present, 0.0, 1.0, 0.0, 1.0)

    def spent_usd(self) -> float:
        return 1.0

    def decided(self, text: str) -> None:
        self.decisions.append(text)

    def returned(self, node: RayNode) -> None:
        self.gone.append(node.name)

    def announce_end(self, node: RayNode, remaining_s: float) -> None:
        self.ends[node.name] = remaining_s

    def cancel_end(self, node: RayNode) -> None:
        del self.ends[node.name]

    def holds_learner(self, node: RayNode) -> bool:
        return node.name == self.learner_on


def scaler_of(
    fleet: Fleet,
    *,
    wanted: int | None = None,
    report_s: float = 1e9,
    drain_s: float = 1e9,
    retry_s: float = 0.05,
    expected: Sequence[RayNode] = (),
    join_s: float = 1e9,
) -> SpotScaler:
    meter = PaceMeter(1.0, 60.0)
    meter.recall([MeasuredIteration(60.0, 2.0, 100.0, 2.0, 2)] * 4)
    limits = ScalerLimits(
        100, time.time() + 3000.0, None, report_s, retry_s, move_s=7.0, drain_s=drain_s, join_s=join_s
    )
    return SpotScaler(
        TargetPolicy(1, 8), meter, fleet, fleet, fleet, limits, time.monotonic, wanted=wanted, done=10,
        expected={node.ray_id for node in expected},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_scaler, "LOOK_S", 0.01)


def beside(scaler: SpotScaler, steps: AsyncIterator[bool]) -> None:
    """Run the scaler while each condition that ``steps`` yields is not true yet."""

    async def run() -> None:
        task = asyncio.create_task(scaler.run())
        async for done in steps:
            if not done:
                await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), 30))


def test_what_is_decided_is_asked_for_and_reported() -> None:
    fleet = Fleet()
    scaler = scaler_of(fleet)

    async def steps() -> AsyncIterator[bool]:
        while not fleet.asked_for:
            yield False
        row = scaler.iterated(10, {Phase.ROLLOUT: 100.0, Phase.TRAINING: 50.0})
        assert row["target/nodes_asked"] == 4.0, "90 iterations in 50 minutes: out of reach of two nodes"
        assert row["target/left_s_low"] < row["target/left_s"] < row["target/left_s_high"]
        while len(fleet.nodes) < 4:
            yield False

    beside(scaler, steps())
    assert fleet.decisions[0].startswith("4 spot nodes instead of 2: the rest (89 iterations) takes ")
    assert "left" in fleet.decisions[0]
    assert fleet.closed


def test_iterations_that_a_lost_learner_makes_again_are_counted_once() -> None:
    fleet, now_s = Fleet(), 0.0
    scaler = scaler_of(fleet)
    scaler.clock = lambda: now_s
    scaler.meter.begin(0.0, 2)
    for iteration in range(10, 14):
        now_s += 60.0
        scaler.iterated(iteration, {Phase.ROLLOUT: 100.0})
    scaler.interrupted(12)
    assert scaler.done == 12
    now_s += 90.0
    row = scaler.iterated(12, {Phase.ROLLOUT: 50.0})
    assert (row["target/iteration_s"], row["target/work_s"]) == (210.0, 250.0)
    assert scaler.done == 13


def test_nodes_are_drained_before_they_end_and_the_learners_last() -> None:
    fleet = Fleet(level=4, learner_on="spot-4")
    scaler = scaler_of(fleet, wanted=2)

    async def steps() -> AsyncIterator[bool]:
        while len(fleet.ends) < 2:
            yield False
        assert fleet.ends == {"spot-3": 0.0, "spot-2": 0.0}
        for _ in range(20):
            yield False
        assert len(fleet.nodes) == 4, "they still work"
        emptied = fleet.nodes[2]
        scaler.emptied(emptied)
        while "spot-3" not in fleet.gone:
            yield False
        while len(fleet.nodes) > 3:
            yield False
        assert [node.name for node in fleet.nodes] == ["spot-1", "spot-2", "spot-4"]
        scaler.lost(emptied)
        scaler.wanted = 3  # again
        while fleet.ends.keys() != {"spot-3"}:
            yield False
        scaler.wanted = 1
        while len(fleet.ends) < 3:
            yield False
        assert "spot-4" not in fleet.ends

    beside(scaler, steps())
    assert fleet.gone == ["spot-3"]


def test_a_node_that_does_not_empty_is_ended_nevertheless() -> None:
    fleet = Fleet(level=2)
    scaler = scaler_of(fleet, wanted=1, drain_s=0.2)

    async def steps() -> AsyncIterator[bool]:
        while len(fleet.nodes) > 1:
            yield False

    beside(scaler, steps())
    assert fleet.gone == ["spot-2"]


def test_a_node_that_holds_the_learner_has_the_time_that_a_move_takes() -> None:
    fleet = Fleet(level=2, learner_on="spot-2")
    scaler, other = scaler_of(fleet, wanted=0, drain_s=0.1), fleet.nodes[0]

    async def steps() -> AsyncIterator[bool]:
        while len(fleet.nodes) > 1:
            yield False
        scaler.lost(other)
        for _ in range(40):
            yield False
        assert [node.name for node in fleet.nodes] == ["spot-2"]
        scaler.emptied(fleet.nodes[0])
        while fleet.nodes:
            yield False

    beside(scaler, steps())
    assert fleet.ends == {"spot-1": 0.0, "spot-2": 7.0}


def test_a_provider_that_fails_is_asked_again_and_reported_once() -> None:
    fleet = Fleet(fails="the API is down")
    scaler = scaler_of(fleet, wanted=3)

    async def steps() -> AsyncIterator[bool]:
        while not fleet.decisions:
            yield False
        fleet.fails = ""
        while len(fleet.nodes) < 3:
            yield False
        fleet.fails = "no quota"
        scaler.wanted = 5
        count = len(fleet.asked_for)
        while len(fleet.asked_for) < count + 3:
            yield False
        fleet.fails = ""
        while len(fleet.nodes) < 5:
            yield False
        scaler.wanted = 4
        while not fleet.ends:
            yield False
        fleet.fails = "no quota"
        scaler.emptied(fleet.nodes[4])
        count = len(fleet.asked_for)
        while len(fleet.asked_for) < count + 2:
            yield False
        fleet.fails = ""
        while len(fleet.nodes) > 4:
            yield False

    beside(scaler, steps())
    assert fleet.decisions == [
        "failed, tried again in 0.05 s: the API is down",
        "failed, tried again in 0.05 s: no quota",
    ]
    assert fleet.gone == ["spot-5"]


def test_a_node_that_the_learner_has_left_is_drained_at_once() -> None:
    fleet = Fleet(level=1, learner_on="spot-1")
    scaler = scaler_of(fleet, wanted=0, drain_s=0.2)

    async def steps() -> AsyncIterator[bool]:
        while not fleet.ends:
            yield False
        assert fleet.ends == {"spot-1": 7.0}
        fleet.learner_on = ""
        while fleet.nodes:
            yield False

    beside(scaler, steps())
    assert fleet.ends == {"spot-1": 0.0}


def test_a_run_that_ends_while_nodes_are_asked_for_gives_back_what_that_brings() -> None:
    fleet = Fleet(takes_s=0.4)
    scaler = scaler_of(fleet, wanted=4)

    async def steps() -> AsyncIterator[bool]:
        while not fleet.calls:
            yield False

    beside(scaler, steps())
    assert fleet.calls == ["ask", "asked", "close"]


def test_nodes_that_were_there_before_the_run_are_waited_for() -> None:
    fleet = Fleet(level=3, joined=False)
    scaler = scaler_of(fleet, expected=fleet.nodes)

    async def steps() -> AsyncIterator[bool]:
        for _ in range(10):
            yield False
        assert not fleet.asked_for
        fleet.joined = True
        while not fleet.asked_for:
            yield False

    beside(scaler, steps())
    assert set(fleet.asked_for) == {(3, ())}, "they are as many as it begins with"
    assert not fleet.ends


@pytest.mark.parametrize("lost", [True, False])
def test_nodes_that_do_not_join_are_not_waited_for_for_ever(lost: bool) -> None:
    fleet = Fleet(level=1, joined=False)
    scaler = scaler_of(fleet, wanted=2, expected=fleet.nodes, join_s=1e9 if lost else 0.2)

    async def steps() -> AsyncIterator[bool]:
        for _ in range(5):
            yield False
        if lost:
            scaler.lost(fleet.nodes[0])
        while not fleet.asked_for:
            yield False

    beside(scaler, steps())


def test_a_provider_that_does_a_part_at_a_time_is_asked_again_at_once() -> None:
    fleet = Fleet(level=1, at_once=1)
    scaler = scaler_of(fleet, wanted=4, retry_s=1e9)

    async def steps() -> AsyncIterator[bool]:
        while len(fleet.nodes) < 4:
            yield False

    beside(scaler, steps())
    assert fleet.asked_for == [(4, ())] * 3


def test_what_is_not_given_back_at_the_end_is_reported() -> None:
    fleet = Fleet()
    scaler = scaler_of(fleet)

    async def steps() -> AsyncIterator[bool]:
        while not fleet.asked_for:
            yield False
        fleet.fails = "spot-1 may still cost money"

    beside(scaler, steps())
    assert fleet.decisions == ["not all spot nodes are given back: spot-1 may still cost money"]


def test_what_the_rest_takes_is_reported_every_hour() -> None:
    fleet = Fleet()
    scaler = scaler_of(fleet, report_s=0.2)

    async def steps() -> AsyncIterator[bool]:
        while len(fleet.decisions) < 3:
            yield False

    beside(scaler, steps())
    assert all(
        text.startswith("2 spot nodes: the rest (90 iterations) takes ") for text in fleet.decisions[:3]
    )
    assert "out of reach; what comes nearest is 8 nodes" in fleet.decisions[0]


def test_what_is_measured_is_read_again_from_the_metrics() -> None:
    measured = [
        MeasuredIteration(60.0, 2.0, 100.0, 1.8, 2),
        MeasuredIteration(50.0, 3.0, 100.0, 2.9, None),
    ]
    rows = [{"train/loss": 1.0}, iteration_row(None, 2)]
    rows += [
        iteration_row(each, asked) | decision_row(None) for each, asked in zip(measured, (4, 4), strict=True)
    ]
    assert measured_before(rows) == (measured, 4)
    assert measured_before(rows[:1]) == ([], None)
