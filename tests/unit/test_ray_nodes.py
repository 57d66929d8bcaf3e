"""From Ray's rows to nodes and back to the controller's; what a node must be to fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.cluster.nodes.listing import (
    LearnerSlots,
    RayNode,
    View,
    gpus_text,
    mixed_gpus,
    read_node,
    read_view,
    require_usable,
    typed,
    unlike,
)
from spotlight.scheduler.fleet.fleet_machine import split_machine
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight_fleet.facts import (
    Gpu,
    NodeFacts,
    gather,
    incompatibility,
    parse_nvidia_smi,
    read_facts,
)
from spotlight_rewards.base.errors import ConfigError, Problem

FACTS = NodeFacts("1.0", "3.11.7", "2.13.0+cu128", "host", (), 1 << 30, "boot", 7)


def row(ray_id: str = "ab" * 28, name: str = "n", alive: bool = True, **more: Any) -> dict[str, object]:
    return {
        "NodeID": ray_id,
        "Alive": alive,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerPort": 4242,
        "RayletSocketName": "/tmp/ray/session_x/sockets/raylet.1",
        "Resources": more.get("resources", {"spotlight_spot": 1.0, "spotlight_slot": 2.0}),
        "Labels": more.get("labels", {}),
    }


def node(name: str, kind: NodeKind = NodeKind.RESERVED, slots: int = 1, gpus: bool = True) -> RayNode:
    return RayNode(name * 8, name, kind, slots, gpus, "H100" if gpus else "cpu", "10.0.0.1", 1, "/tmp/ray/s")


@pytest.mark.parametrize(
    ("resources", "labels", "kind", "slots", "gpus", "gpu_type"),
    [
        ({"spotlight_spot": 1, "spotlight_slot": 2}, {}, NodeKind.SPOT, 2, False, "cpu"),
        (
            {"spotlight_reserved": 0.01, "GPU": 8, "accelerator_type:H200": 1},
            {},
            NodeKind.RESERVED,
            8,
            True,
            "H200",
        ),
        (
            {"GPU": 1},
            {"spotlight.io/kind": "spot", "ray.io/accelerator-type": "L4"},
            NodeKind.SPOT,
            1,
            True,
            "L4",
        ),
        (
            {"GPU": 1},
            {"spotlight.io/kind": "spot", "spotlight.io/gpu-type": "A100"},
            NodeKind.SPOT,
            1,
            True,
            "A100",
        ),
        ({"spotlight_reserved": 1}, {"spotlight.io/kind": "reserved"}, NodeKind.RESERVED, 0, False, "cpu"),
        ({"spotlight_spot": 1, "GPU": 1}, {}, NodeKind.SPOT, 1, True, ""),
    ],
)
def test_kind_and_slots_by_resource_or_label(
    resources: dict[str, float], labels: dict[str, str], kind: NodeKind, slots: int, gpus: bool, gpu_type: str
) -> None:
    found = read_node(row(resources=resources, labels=labels))
    assert isinstance(found, RayNode)
    assert (found.kind, found.slots, found.gpus, found.gpu_type) == (kind, slots, gpus, gpu_type)
    assert (found.address, found.port, found.session) == ("10.0.0.1", 4242, "/tmp/ray/session_x")


@pytest.mark.parametrize(
    ("resources", "labels", "found", "remedy"),
    [
        (
            {"spotlight_spot": 1, "spotlight_reserved": 1},
            {},
            "several kinds (reserved, spot)",
            "one of the resources",
        ),
        (
            {"spotlight_spot": 1},
            {"spotlight.io/kind": "reserved"},
            "several kinds",
            "a label spotlight.io/kind",
        ),
        ({}, {"spotlight.io/kind": "spto"}, "spotlight.io/kind=spto", "--labels=spotlight.io/kind=spot"),
        ({"GPU": 2}, {}, "slots, but no kind", "--resources='{\"spotlight_spot\": 1}'"),
        (
            {"spotlight_spot": 1, "GPU": 1, "spotlight_slot": 2},
            {},
            "1 GPUs and 2 of spotlight_slot",
            "--num-gpus=0",
        ),
        ({"spotlight_spot": 1, "spotlight_slot": 1.5}, {}, "1.5 slots", "a whole number"),
    ],
)
def test_nodes_that_contradict_themselves_are_reported_with_the_flags_that_mend_them(
    resources: dict[str, float], labels: dict[str, str], found: str, remedy: str
) -> None:
    problem = read_node(row(resources=resources, labels=labels))
    assert isinstance(problem, Problem)
    assert problem.key == "node 'n'"
    assert found in problem.found
    assert remedy in problem.remedy


def test_a_node_without_mark_and_slots_is_nobodys_business() -> None:
    assert read_node(row(resources={"CPU": 4.0})) is None


# -- views --------------------------------------------------------------------------------------------------

living = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=2), st.text("0123456789abcdef", min_size=56, max_size=56)),
    unique_by=lambda pair: pair[1],
    max_size=6,
)


@given(living, living)
def test_names_are_unique_among_the_living_and_stay(
    before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    first = read_view([row(ray_id, name) for name, ray_id in before])
    names = {ray_id: seen.name for ray_id, seen in first.nodes.items()}
    known = set(names)
    both = {ray_id: name for name, ray_id in [*before, *after]}
    second = read_view([row(ray_id, name) for ray_id, name in both.items()], names)
    for view in (first, second):
        assert len({seen.name for seen in view.nodes.values()}) == len(view.nodes)
    assert all(second.nodes[ray_id].name == names[ray_id] for ray_id in known)
    assert second.nodes.keys() == both.keys()


def test_a_node_that_comes_back_is_another_with_its_name() -> None:
    rows = [row("aa" * 28, alive=False), row("bb" * 28)]
    view = read_view(rows, {"aa" * 28: "n"})
    assert [(ray_id, seen.name) for ray_id, seen in view.nodes.items()] == [("bb" * 28, "n")]


@pytest.mark.parametrize(
    ("nodes", "ranks", "message"),
    [
        ([node("a", NodeKind.SPOT)], 1, "no reserved node"),
        ([node("a", slots=0)], 1, "no GPU and no spotlight_slot"),
        (
            [node("a", slots=2), node("b", NodeKind.SPOT, 8)],
            3,
            "fleet.learner_ranks: found 3; expected at most 2",
        ),
        ([], 1, "nodes: none"),
    ],
)
def test_clusters_that_cannot_train(nodes: list[RayNode], ranks: int, message: str) -> None:
    view = View({seen.ray_id: seen for seen in nodes}, {})
    with pytest.raises(ConfigError, match="the cluster at x") as caught:
        require_usable(view, ranks, "the cluster at x")
    assert message in str(caught.value)
    assert "ray start" in str(caught.value) or "Lower it" in str(caught.value)


def test_a_cluster_of_reserved_and_spot_nodes_can_train() -> None:
    nodes = [node("a"), node("b", NodeKind.SPOT, 8)]
    require_usable(View({seen.ray_id: seen for seen in nodes}, {}), 1, "x")


# -- learner ranks and parts --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(1, 16))
def test_learner_ranks_fill_few_nodes(slots: list[int], ranks: int) -> None:
    nodes = [node(chr(ord("a") + index), slots=count) for index, count in enumerate(slots)]
    nodes.append(node("z", NodeKind.SPOT, 8))
    if ranks > sum(slots):
        with pytest.raises(ConfigError, match=f"at most {sum(slots)}"):
            LearnerSlots.plan(ranks, nodes)
        return
    placed = {ray_id: count for ray_id, (_, count) in LearnerSlots.plan(ranks, nodes).by_node.items()}
    by_id = {seen.ray_id: seen for seen in nodes}
    assert sum(placed.values()) == ranks
    assert all(0 < count <= by_id[ray_id].slots for ray_id, count in placed.items())
    assert all(by_id[ray_id].kind is NodeKind.RESERVED for ray_id in placed)
    most_first = sorted(slots, reverse=True)
    fewest = next(n for n in range(1, len(slots) + 1) if sum(most_first[:n]) >= ranks)
    assert len(placed) == fewest


@given(st.integers(1, 8), st.integers(0, 8), st.booleans())
def test_parts_of_a_machine_share_its_gpus(slots: int, ranks: int, roll_out: bool) -> None:
    machine = Node(NodeId("a"), NodeKind.RESERVED, slots, "h100", 2.0 * slots, trains=False, rolls_out=True)
    if ranks > slots:
        with pytest.raises(ValueError, match="learner ranks"):
            split_machine(machine, ranks, ranks_roll_out=roll_out)
        return
    parts = split_machine(machine, ranks, ranks_roll_out=roll_out)
    assert sum(part.gpus for part in parts) == slots
    assert sum(part.price_usd_h for part in parts) == 2.0 * slots
    assert sum(part.gpus for part in parts if part.trains) == ranks
    assert len({part.id for part in parts}) == len(parts)
    assert all(part.rolls_out == (roll_out or not part.trains) for part in parts)
    if len(parts) == 1:
        assert parts[0].id == "a"


# -- facts --------------------------------------------------------------------------------------------------


def test_a_type_that_nobody_names_is_that_of_the_driver() -> None:
    labelled, facts = node("a"), replace(FACTS, gpus=(Gpu("L4", 22 << 30),))
    unknown = replace(labelled, gpu_type="")
    assert typed(unknown, facts).gpu_type == "L4"
    assert typed(unknown, FACTS) == unknown
    assert typed(replace(labelled, gpu_type="H100"), facts).gpu_type == "H100"
    assert typed(replace(unknown, gpus=False), facts).gpu_type == ""


def test_gpus_of_two_kinds_in_one_node_are_reported() -> None:
    big, small, odd = Gpu("H100", 80 << 30), Gpu("H100", 40 << 30), Gpu("L4", 80 << 30)
    nearly = Gpu("H100", (80 << 30) - (1 << 28))
    for gpus in ((), (big,), (big, nearly, big)):
        assert mixed_gpus(node("a"), replace(FACTS, gpus=gpus)) is None
    for other in (small, odd):
        facts = replace(FACTS, gpus=(big, other))
        problem = mixed_gpus(node("d"), facts)
        assert problem is not None
        assert "'d'" in problem.key
        assert other.name in problem.found
        assert unlike(big, other)
        assert gpus_text(facts) == f"H100 of 80 GiB and {other.name} of {other.memory_bytes >> 30} GiB"
        assert mixed_gpus(node("d", gpus=False), facts) is None


@pytest.mark.parametrize(
    ("change", "found", "remedy"),
    [
        ({"spotlight": "0.9"}, "spotlight-rl 0.9", "pip install spotlight-rl==1.0"),
        ({"torch": "2.12.0"}, "torch 2.12.0", "torch==2.13.0"),
        ({"python": "3.12.1"}, "python 3.12", "one image"),
    ],
)
def test_a_node_of_another_version_is_reported_with_both(
    change: dict[str, str], found: str, remedy: str
) -> None:
    problem = incompatibility("n", FACTS, replace(FACTS, **change))  # type: ignore[arg-type]
    assert problem is not None
    assert problem.found == found
    assert "as on the head" in problem.expected
    assert remedy in problem.remedy


def test_what_does_not_matter_does_not_exclude_a_node() -> None:
    assert (
        incompatibility(
            "n", FACTS, replace(FACTS, python="3.11.9", torch="2.13.0+cpu", host="other", gpus=())
        )
        is None
    )


def test_facts_cross_versions() -> None:
    mine = replace(gather(), gpus=(Gpu("L4", 24 << 30),))
    assert read_facts(mine.as_json()) == mine
    assert read_facts({**mine.as_json(), "new": [1]}) == mine
    old = read_facts({"spotlight": "0.1"})
    assert (old.spotlight, old.torch, old.gpus, old.shm_free_bytes) == ("0.1", "unknown", (), 0)


def test_the_drivers_list_of_gpus() -> None:
    text = "0, GPU-1a2, NVIDIA H200, 143771\n1, GPU-1b3, NVIDIA A100, [N/A]\n\n2, GPU-1b4, NVIDIA L4, 23034\n"
    h200, l4 = Gpu("NVIDIA H200", 143771 << 20), Gpu("NVIDIA L4", 23034 << 20)
    for visible, expected in (
        (None, (h200, l4)),
        ("2", (l4,)),
        ("2, 0", (h200, l4)),
        ("GPU-1a", (h200,)),
        ("GPU-1b4,1", (l4,)),
        ("MIG-5", ()),
        ("", ()),
    ):
        assert parse_nvidia_smi(text, visible) == expected, visible
