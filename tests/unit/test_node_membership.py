"""Nodes that answer late, many at once, do not keep the head from seeing the others."""

from __future__ import annotations

import itertools
import math
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from spotlight.cluster.nodes import node_membership
from spotlight.cluster.nodes.listing import RayNode, read_view
from spotlight.cluster.nodes.node_membership import MembershipSettings, NodeMembership
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import NodeId
from spotlight_fleet.facts import NodeFacts
from spotlight_fleet.notices.notice_mail import Message, NoticeUpdate
from spotlight_fleet.notices.notice_watch import NoticeSettings

SETTINGS = MembershipSettings(NoticeSettings())
HERE = NodeFacts("1", "3.11.1", "2", "here", (), 0, "b", 1)
AT_ONCE = 16


class RayLossListener:
    """A listener that remembers how Ray was given up."""

    def __init__(self) -> None:
        self.ray_was_lost: list[str] = []
        self.notes: list[str] = []
        self.events: list[ev.Event] = []

    def told(self, text: str) -> None:
        self.notes.append(text)

    def happened(self, event: ev.Event) -> None:
        self.events.append(event)

    def ray_lost(self, why: str) -> None:
        self.ray_was_lost.append(why)

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


class SlowList:
    """Ray's list of nodes: answers, or lets the whole timeout pass, and ``late_s`` more."""

    def __init__(self) -> None:
        self.now_s, self.answers, self.late_s = 0.0, True, 0.0

    def ask(self, timeout_s: float) -> Sequence[Mapping[str, object]] | None:
        if self.answers:
            return []
        self.now_s += timeout_s + self.late_s
        return None


@dataclass
class SilentRay:
    """A membership that asks a list in virtual time."""

    mortal_gcs: str = ""
    listener: RayLossListener = field(default_factory=RayLossListener)
    nodes: SlowList = field(default_factory=SlowList)

    def __post_init__(self) -> None:
        settings = replace(SETTINGS, mortal_gcs=self.mortal_gcs)
        self.membership = NodeMembership(self.listener, HERE, settings, lambda: self.nodes.now_s)  # type: ignore[arg-type]
        self.membership._pulse._list = self.nodes  # type: ignore[assignment]
        self.nodes.answers = False


def test_ray_is_given_up_for_its_own_silence_not_for_that_of_this_process() -> None:
    ray = SilentRay()
    ray.nodes.answers = True
    ray.membership._rows()
    ray.nodes.now_s += 10 * SETTINGS.dead_s  # this thread was busy
    ray.nodes.answers = False
    ray.nodes.late_s = 10 * SETTINGS.dead_s  # this process stood still while it waited
    ray.membership._rows()
    ray.nodes.late_s = 0.0
    assert ray.listener.ray_was_lost == ray.listener.notes == []
    asks = 2  # the late one counts for two
    while asks * SETTINGS.period_s < SETTINGS.dead_s:
        assert ray.listener.ray_was_lost == []
        assert len(ray.listener.notes) == (asks * SETTINGS.period_s >= SETTINGS.answer_s)
        ray.membership._rows()
        asks += 1
    assert ray.listener.ray_was_lost == ["Ray is dead: it has not listed its nodes for 30 s"]


def test_a_silence_that_ended_counts_no_more_and_the_next_is_told_again() -> None:
    ray = SilentRay()
    for _ in range(2):
        for _ in range(math.ceil(SETTINGS.answer_s / SETTINGS.period_s)):
            ray.membership._rows()
        ray.nodes.answers = True
        ray.membership._rows()
        ray.nodes.answers = False
    silence = (
        "Ray does not answer: it has not listed its nodes for 10 s; after 30 s the run ends, and can be "
        "resumed"
    )
    assert ray.listener.notes == [silence] * 2


def test_a_gcs_that_nobody_restarts_is_dead_once_it_refuses_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        ray = SilentRay(address)
        ray.membership._rows()
        assert ray.listener.ray_was_lost == [], "it listens: it may be busy"
    ray.membership._rows()
    assert ray.listener.ray_was_lost == ["Ray is dead: its GCS refuses connections"]
    elsewhere = SilentRay()
    elsewhere.membership._rows()
    assert elsewhere.listener.ray_was_lost == [], "its GCS may be restarted"


def test_a_lost_ray_is_told_once_and_looked_after_no_more() -> None:
    ray = SilentRay()
    looking = threading.Thread(target=ray.membership._run, daemon=True)
    looking.start()
    looking.join(60)
    assert not looking.is_alive()
    assert ray.listener.ray_was_lost == ["Ray is dead: it has not listed its nodes for 30 s"]


def test_an_agent_that_a_hung_ray_never_starts_does_not_keep_it_from_being_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(node_membership, "start_agent", lambda *_: over.wait())
    settings = replace(SETTINGS, answer_s=0.01)
    membership = NodeMembership(RayLossListener(), HERE, settings)  # type: ignore[arg-type]
    membership._watched["0"] = watched = node_membership._Watched(SimpleNamespace(name="spot"))  # type: ignore[arg-type]
    try:
        membership._start_agents()
        assert watched.agent is None
        membership._start_agents()  # it is not started twice
        assert len(membership._helpers._threads) == 1
    finally:
        over.set()


def row(number: int, name: str) -> Mapping[str, object]:
    return {
        "NodeID": f"{number:056x}",
        "Alive": True,
        "Resources": {"spotlight_spot": 1.0, "GPU": 1.0},
        "Labels": {},
        "NodeName": name,
        "NodeManagerAddress": "127.0.0.1",
        "NodeManagerPort": 1,
        "RayletSocketName": "/tmp/ray/s/sockets/raylet",
    }


def test_a_node_keeps_its_name_when_another_of_that_name_joins_before_the_first_look() -> None:
    first, newcomer = row(2, "10.0.0.1"), row(1, "10.0.0.1")
    (known,) = read_view([first]).nodes.values()
    membership = NodeMembership(RayLossListener(), HERE, SETTINGS, known=[known])  # type: ignore[arg-type]
    membership._look([first, newcomer])
    names = {ray_id: watched.node.name for ray_id, watched in membership._watched.items()}
    assert names.pop(known.ray_id) == known.name == "10.0.0.1"
    assert list(names.values()) == ["10.0.0.1~000000"]


def test_machines_that_are_switched_off_together_are_probed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = threading.Barrier(AT_ONCE, timeout=30)

    def listens(_: RayNode) -> bool:
        everybody.wait()
        return False

    monkeypatch.setattr(node_membership, "raylet_listens", listens)
    membership = NodeMembership(RayLossListener(), HERE, SETTINGS)  # type: ignore[arg-type]
    rows = [row(number, f"spot-{number}") for number in range(AT_ONCE)]
    membership._look(rows)
    assert len(membership._watched) == AT_ONCE
    membership._examine({str(row["NodeID"]): RayActorError() for row in rows})
    assert membership._watched == {}


@pytest.mark.parametrize("lives", [True, False])
def test_a_node_is_not_noticed_when_ray_ends_its_agent(monkeypatch: pytest.MonkeyPatch, lives: bool) -> None:
    listener = RayLossListener()
    monkeypatch.setattr(node_membership, "raylet_listens", lambda node: lives or node.name != "head")
    monkeypatch.setattr(node_membership, "drain_node", lambda *_: True)
    monkeypatch.setattr(
        node_membership.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0")
    )
    membership = NodeMembership(listener, HERE, SETTINGS)  # type: ignore[arg-type]
    head, spot = (
        SimpleNamespace(name=name, ray_id=ray_id) for name, ray_id in (("head", "0"), ("spot", "1"))
    )
    membership._watched["0"] = SimpleNamespace(node=head)  # type: ignore[assignment]
    told = node_membership._Watched(spot)  # type: ignore[arg-type]
    membership._pass_on(told, Message(1, NoticeUpdate.NOTICED, "SIGTERM", 10.0))
    assert [event.node for event in listener.events if isinstance(event, ev.NodeNoticed)] == ["spot"] * lives
    assert len(listener.events) == lives


def test_advice_of_the_cloud_reaches_the_run() -> None:
    listener = RayLossListener()
    membership = NodeMembership(listener, HERE, SETTINGS)  # type: ignore[arg-type]
    spot = node_membership._Watched(SimpleNamespace(name="spot", ray_id="1"))  # type: ignore[arg-type]
    membership._pass_on(spot, Message(1, NoticeUpdate.REBALANCE, "rebalance recommended", 0.0))
    assert listener.events == [ev.NodeAdvised(NodeId("spot"))]


def test_of_two_notices_the_earliest_counts_and_ray_s_own_drain_is_not_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = RayLossListener()
    monkeypatch.setattr(node_membership, "drain_node", lambda *_: True)
    monkeypatch.setattr(NodeMembership, "_ray_ends", lambda self: False)
    drains: dict[str, int] = {}
    monkeypatch.setattr(node_membership, "draining_nodes", lambda: drains)
    ticks = itertools.count()  # no two readings are equal
    membership = NodeMembership(listener, HERE, SETTINGS, lambda: next(ticks) / 1e4)  # type: ignore[arg-type]

    def look() -> None:
        membership._look_at_drains()
        assert membership._drains is not None
        membership._drains.exception()

    def watched(name: str) -> node_membership._Watched:
        node = SimpleNamespace(name=name, ray_id=name)
        membership._watched[name] = node_membership._Watched(node, facts=HERE)  # type: ignore[arg-type]
        return membership._watched[name]

    cloud, autoscaler = watched("cloud"), watched("autoscaler")
    membership._pass_on(cloud, Message(1, NoticeUpdate.NOTICED, "a cloud", 30.0))
    drains |= {"cloud": 0, "autoscaler": 0}
    look()
    look()
    membership._pass_on(cloud, Message(2, NoticeUpdate.CANCELLED, "it stays", 0.0))
    look()
    later, sooner = (Message(1, NoticeUpdate.NOTICED, "a cloud", left_s) for left_s in (90.0, 9.0))
    stays = Message(2, NoticeUpdate.CANCELLED, "it stays", 0.0)
    for message in (later, stays, sooner, stays):
        membership._pass_on(autoscaler, message)
    look()
    told = [
        (event.node, round(event.deadline_s)) if isinstance(event, ev.NodeNoticed) else event
        for event in listener.events
    ]
    stayed, back = (ev.NoticeCancelled(NodeId(name)) for name in ("cloud", "autoscaler"))
    drained_again = ("autoscaler", 30)
    assert told == [("cloud", 30), ("autoscaler", 30), stayed, ("autoscaler", 9), back, drained_again]
