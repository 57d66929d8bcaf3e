"""Nodes that answer late, many at once, do not keep the head from seeing the others."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from spotlight.cluster.nodes import node_membership
from spotlight.cluster.nodes.facts import NodeFacts
from spotlight.cluster.nodes.listing import RayNode, read_view
from spotlight.cluster.nodes.node_membership import MembershipSettings, NodeMembership
from spotlight.cluster.nodes.notice_mail import Message, NoticeUpdate
from spotlight.cluster.nodes.notice_watch import NoticeSettings

SETTINGS = MembershipSettings(NoticeSettings())
HERE = NodeFacts("1", "3.11.1", "2", "here", (), 0, "b", 1)
AT_ONCE = 16


class RayLossListener:
    """A listener that remembers how Ray was given up."""

    def __init__(self) -> None:
        self.ray_was_lost: list[str] = []

    def ray_lost(self, why: str) -> None:
        self.ray_was_lost.append(why)

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


class SlowList:
    """Ray's list of nodes: answers, or lets the whole timeout pass."""

    def __init__(self) -> None:
        self.now_s, self.answers = 0.0, True

    def ask(self, timeout_s: float) -> Sequence[Mapping[str, object]] | None:
        if self.answers:
            return []
        self.now_s += timeout_s
        return None


def test_ray_is_given_up_for_its_own_silence_not_for_that_of_this_process() -> None:
    listener, nodes = RayLossListener(), SlowList()
    membership = NodeMembership(listener, HERE, SETTINGS, lambda: nodes.now_s)  # type: ignore[arg-type]
    membership._list = nodes  # type: ignore[assignment]
    membership._rows()
    nodes.now_s += 10 * SETTINGS.dead_s  # this thread was busy
    nodes.answers = False
    membership._rows()
    assert listener.ray_was_lost == []
    since_s = nodes.now_s - SETTINGS.answer_s
    while nodes.now_s - since_s < SETTINGS.dead_s:
        assert listener.ray_was_lost == []
        membership._rows()
    assert len(listener.ray_was_lost) == 1


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
    noticed: list[str] = []
    listener = RayLossListener()
    listener.noticed = lambda node, *_: noticed.append(node.name)  # type: ignore[attr-defined]
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
    membership._pass_on(spot, Message(1, NoticeUpdate.NOTICED, "SIGTERM", 10.0))  # type: ignore[arg-type]
    assert noticed == ["spot"] * lives
