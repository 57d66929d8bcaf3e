"""Which node of a cluster a reward's process goes to. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from spotlight.cluster.nodes.listing import REWARD_NODE, View
from spotlight.config.schema import RunConfig
from spotlight.scheduler.types import NodeKind
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.reward_config import RewardConfig, RewardDevice


@dataclass(frozen=True, slots=True)
class ScorerNode:
    """A living node that may hold reward processes.

    Attributes:
        kind: None: set aside for rewards.
        cpus, gpus: what Ray may hand out there; emulated nodes have neither.
        here: the node of the process that runs the command.
    """

    ray_id: str
    name: str
    kind: NodeKind | None
    cpus: float
    gpus: float
    here: bool


@dataclass(frozen=True, slots=True)
class ScorerPlace:
    """Where one reward process goes.

    Attributes:
        gpu: index among the node's GPUs of the learner's that it shares; None: one that Ray assigns, or none.
    """

    node: ScorerNode
    gpu: int | None = None


def scorer_nodes(rows: Sequence[Mapping[str, object]], view: View, here: str) -> list[ScorerNode]:
    """The nodes among those of ``ray.nodes()``: those of the fleet, and those set aside for rewards."""
    found = []
    for row in rows:
        resources, ray_id = row.get("Resources"), str(row["NodeID"])
        if not row["Alive"] or not isinstance(resources, Mapping):
            continue
        node = view.nodes.get(ray_id)
        if node is not None or REWARD_NODE in resources:
            name = node.name if node else str(row.get("NodeName") or row.get("NodeManagerAddress") or ray_id)
            cpus, gpus = float(resources.get("CPU", 0.0)), float(resources.get("GPU", 0.0))
            found.append(ScorerNode(ray_id, name, node.kind if node else None, cpus, gpus, ray_id == here))
    return found


def choose_node(
    nodes: Sequence[ScorerNode],
    device: RewardDevice,
    held: Mapping[str, int],
    avoided: Collection[str] = (),
) -> ScorerNode | None:
    """The node for one more process; None: there is none now.

    Preferred are nodes with a CPU for it; of these, for ``spot``, spot nodes, then nodes set aside for
    rewards, then reserved ones, and of these last the one that runs the command. Among equals, the one with
    the fewest processes per CPU. Where no CPU is left, processes share. ``cuda`` goes to nodes set aside
    only, with a GPU for each.

    Args:
        held: processes by Ray id of their node.
        avoided: Ray ids of nodes that have just lost or refused a process; taken if nothing else is left.
    """
    able = [node for node in nodes if _rank(node, device) is not None]
    if device == "cuda":
        able = [node for node in able if held.get(node.ray_id, 0) < int(node.gpus)]

    def order(node: ScorerNode) -> tuple[bool, bool, int, float, str]:
        rank, here = _rank(node, device), held.get(node.ray_id, 0)
        assert rank is not None
        full = device != "cuda" and not _has_cpu(node, here)
        return node.ray_id in avoided, full, rank, (here + 1) / max(1.0, node.cpus), node.name

    return min(able, key=order, default=None)


def beside_learner(
    nodes: Sequence[ScorerNode], learner_slots: Mapping[str, int], replica: int
) -> ScorerPlace | None:
    """The place of a reward's ``replica``-th process among the learner's ranks, in turn; None: there is none.

    Args:
        learner_slots: numbers of ranks by Ray id of their node, where they have the first GPUs.
    """
    ranks = [
        ScorerPlace(node, slot if node.gpus else None)
        for node in sorted(nodes, key=lambda node: node.ray_id)
        for slot in range(learner_slots.get(node.ray_id, 0))
    ]
    return ranks[replica % len(ranks)] if ranks else None


def has_spot(nodes: Sequence[ScorerNode], held: Mapping[str, int], refused: Collection[str]) -> bool:
    """Whether a spot node has a CPU for one more process, and has not refused it."""
    return any(
        node.kind is NodeKind.SPOT and node.ray_id not in refused and _has_cpu(node, held.get(node.ray_id, 0))
        for node in nodes
    )


def preferred_cores(nodes: Sequence[ScorerNode], device: RewardDevice) -> int:
    """CPUs of the nodes that processes go to while there is room; 0 for emulated ones."""
    ranks = {node.ray_id: rank for node in nodes if (rank := _rank(node, device)) is not None}
    best = min(ranks.values(), default=None)
    return sum(int(node.cpus) for node in nodes if ranks.get(node.ray_id, -1) == best)


def placed_by_ray(config: RunConfig) -> list[RewardConfig]:
    """The rewards whose processes go to nodes of the cluster; the others run beside the command."""
    return [
        reward
        for reward in config.rewards
        if (reward.device != "auto" or config.fleet.address is not None) and not reward.is_beside_command
    ]


def require_places(rewards: Sequence[RewardConfig], replicas: int, nodes: Sequence[ScorerNode]) -> None:
    """Check that every reward with a GPU of its own has one; ConfigError names the remedy.

    Args:
        replicas: processes of a reward that names none.
    """
    wanted = sum(reward.replicas or replicas for reward in rewards if reward.device == "cuda")
    there = sum(int(node.gpus) for node in nodes if node.kind is None)
    if wanted > there:
        problem = Problem(
            "rewards[].device", f"'cuda' for {wanted} processes",
            f"at most {there}, the GPUs of the nodes set aside for rewards",
            f"Start a node with ray start --num-gpus=N --resources='{{\"{REWARD_NODE}\": 1}}', lower "
            "rewards[].replicas, or set device: cpu.",
        )  # fmt: skip
        raise ConfigError("the cluster", [problem])


def _has_cpu(node: ScorerNode, held: int) -> bool:
    return held < int(node.cpus) or int(node.cpus) == 0  # emulated nodes have no number


def _rank(node: ScorerNode, device: RewardDevice) -> int | None:
    if device == "cuda":
        return 0 if node.kind is None and node.gpus >= 1 else None
    if device == "spot" and node.kind is NodeKind.SPOT:
        return 0
    if node.kind is NodeKind.SPOT and not node.here:  # the head's lives as long as the run does
        return None
    return 1 if node.kind is None else 3 if node.here else 2
