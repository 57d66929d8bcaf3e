"""Translate Ray's node list into the controller's nodes. Pure.

A node is reserved, spot or on demand by a custom resource of any amount (``spotlight_reserved``,
``spotlight_spot``, ``spotlight_on_demand``) or the label ``spotlight.io/kind``. Its slots are its GPUs, or
the custom resource ``spotlight_slot`` on CPU nodes.

A returning node gets a new Ray id and may appear before Ray has noticed its earlier death, so names are
unique among living nodes and fixed for a node's life (:func:`unique_name`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from spotlight.scheduler.fleet.rank_places import choose_places
from spotlight.scheduler.types import NodeKind
from spotlight_fleet.facts import Gpu, NodeFacts
from spotlight_fleet.ray_names import KIND_RESOURCES, SLOT, SUFFIX
from spotlight_rewards.base.errors import ConfigError, Problem

REWARD_NODE = "spotlight_reward"
"""Resource of a node set aside for reward processes: it neither trains nor rolls out."""
SHARE = 0.5
"""Slot share of a learner rank, and of the worker beside it."""
ALL_GPUS_VISIBLE = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
"""Runtime environment of a process that sees all GPUs of its node and picks one by index."""
KIND_LABEL = "spotlight.io/kind"
GPU_LABEL = "spotlight.io/gpu-type"
_RAY_GPU_LABEL = "ray.io/accelerator-type"
_RAY_GPU_RESOURCE = "accelerator_type:"
_START = "ray start --resources='{\"%s\": 1}'"
_MEMORY_TOLERANCE = 0.02
"""GPUs of one type differ by what firmware reserves."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A Ray node marked for this package.

    Attributes:
        ray_id: Ray's id of this life of the node.
        name: unique among living nodes.
        slots: how many workers or learner ranks it can hold; may be 0.
        gpus: whether a slot is a GPU.
        gpu_type: from the node's flags or Ray; ``cpu`` for CPU slots; empty: unknown.
        port: of its raylet.
        session: directory of Ray's logs and sockets on that node.
    """

    ray_id: str
    name: str
    kind: NodeKind
    slots: int
    gpus: bool
    gpu_type: str
    address: str
    port: int
    session: str


@dataclass(frozen=True, slots=True)
class View:
    """Living nodes by Ray id, and the problems of those left out."""

    nodes: Mapping[str, RayNode]
    problems: Mapping[str, Problem]


def read_view(rows: Sequence[Mapping[str, object]], names: Mapping[str, str] | None = None) -> View:
    """Read ``ray.nodes()``. ``names``: of nodes already known, by Ray id; they keep them."""
    living = {str(row["NodeID"]): row for row in rows if row["Alive"]}
    given = {ray_id: name for ray_id, name in (names or {}).items() if ray_id in living}
    nodes: dict[str, RayNode] = {}
    problems: dict[str, Problem] = {}
    for ray_id in sorted(living):
        found = read_node(living[ray_id])
        if isinstance(found, Problem):
            problems[ray_id] = found
        elif found is not None:
            if ray_id not in given:
                given[ray_id] = unique_name(found, given.values())
            nodes[ray_id] = replace(found, name=given[ray_id])
    return View(nodes, problems)


def read_node(row: Mapping[str, object]) -> RayNode | Problem | None:
    """Read one row of ``ray.nodes()``; None if it has neither mark nor slots."""
    resources, labels = _numbers(row.get("Resources")), _texts(row.get("Labels"))
    address = str(row.get("NodeManagerAddress") or "")
    name = str(row.get("NodeName") or "") or address
    place = f"node {name!r}"
    kinds = {NodeKind(kind) for kind, resource in KIND_RESOURCES.items() if resources.get(resource, 0) > 0}
    if (label := labels.get(KIND_LABEL)) is not None:
        if label not in set(NodeKind):
            return Problem(
                place, f"label {KIND_LABEL}={label}", f"{' or '.join(NodeKind)}",
                f"Start it with ray start --labels={KIND_LABEL}=spot.",
            )  # fmt: skip
        kinds.add(NodeKind(label))
    if len(kinds) > 1:
        return Problem(
            place, f"several kinds ({', '.join(sorted(kinds))})", "one",
            f"Start it with one of the resources {', '.join(KIND_RESOURCES.values())}, "
            f"and a label {KIND_LABEL} that says the same or none.",
        )  # fmt: skip
    gpus, slots = resources.get("GPU", 0.0), resources.get(SLOT, 0.0)
    if gpus and slots:
        return Problem(
            place, f"{gpus:g} GPUs and {slots:g} of {SLOT}", "one of them",
            f"Leave {SLOT} out to use the GPUs, or start it with ray start --num-gpus=0.",
        )  # fmt: skip
    if (gpus or slots) != int(gpus or slots):
        return Problem(place, f"{gpus or slots:g} slots", "a whole number", f"Give {SLOT} a whole number.")
    if not kinds:
        if not (gpus or slots) or resources.get(REWARD_NODE, 0) > 0:
            return None
        return Problem(
            place, "slots, but no kind", "reserved, spot or on-demand",
            f"Start it with {_START % KIND_RESOURCES[NodeKind.SPOT]} "
            f"(or {KIND_RESOURCES[NodeKind.RESERVED]}), or --labels={KIND_LABEL}=spot.",
        )  # fmt: skip
    gpu_type = _gpu_type(resources, labels) if gpus else "cpu"
    session = str(PurePosixPath(str(row.get("RayletSocketName") or "")).parent.parent)
    ray_id, count = str(row["NodeID"]), int(gpus or slots)
    port = int(str(row.get("NodeManagerPort") or 0))
    return RayNode(ray_id, name, kinds.pop(), count, bool(gpus), gpu_type, address, port, session)


def unique_name(node: RayNode, taken: Collection[str]) -> str:
    """The node's own name, plus a prefix of its Ray id if a living node has that name."""
    if node.name not in taken:
        return node.name
    names = (f"{node.name}{SUFFIX}{node.ray_id[:digits]}" for digits in range(6, len(node.ray_id) + 1))
    return next(name for name in names if name not in taken)


def require_usable(view: View, learner_ranks: int, source: str, *, spot_head: bool = False) -> None:
    """Check that training can start on these nodes; ConfigError lists every problem and its remedy.

    Args:
        learner_ranks: on reserved nodes; 0: they go to spot nodes, which may come later.
        spot_head: the head may be on a spot node.
    """
    problems = list(view.problems.values())
    nodes = view.nodes.values()
    reserved = [node for node in nodes if node.kind is NodeKind.RESERVED]
    names = ", ".join(node.name for node in nodes) or "none"
    if not reserved and not spot_head:
        problems.append(
            Problem(
                source,
                f"no reserved node (nodes: {names})",
                "at least one, for the head",
                f"Start one with {_START % KIND_RESOURCES[NodeKind.RESERVED]}, "
                f"or --labels={KIND_LABEL}=reserved; or set fleet.head=any.",
            )
        )
    if learner_ranks and not any(node.slots for node in nodes):
        problems.append(
            Problem(
                source,
                f"no GPU and no {SLOT} on any node (nodes: {names})",
                "at least one",
                f"Start nodes with GPUs, or where CPUs stand for them with SPOTLIGHT_SLOTS=N "
                f'launch/ray-start.sh (ray start --num-gpus=0 --resources=\'{{"spotlight_reserved": 1, '
                f'"{SLOT}": N}}\').',
            )
        )
    elif (reserved or spot_head) and (slots := sum(node.slots for node in reserved)) < learner_ranks:
        problems.append(
            Problem(
                "fleet.learner_ranks",
                str(learner_ranks),
                f"at most {slots}, the slots of the reserved nodes",
                "Lower it, or add a reserved node.",
            )
        )
    if problems:
        raise ConfigError(source, problems)


def mixed_gpus(node: RayNode, facts: NodeFacts) -> Problem | None:
    """Problem of a node with unlike GPUs, since its weakest GPU limits a sequence-parallel group."""
    for gpu in facts.gpus[1:] if node.gpus else ():
        if unlike(gpu, facts.gpus[0]):
            return Problem(
                f"node {node.name!r}", f"{_gpu_text(gpu)} beside {_gpu_text(facts.gpus[0])}",
                "GPUs of one type and memory on a node with fleet.sequence_parallel.degrees above 1",
                "Set fleet.sequence_parallel.degrees=[1], or start Ray once for each type of GPU there "
                "(CUDA_VISIBLE_DEVICES).",
            )  # fmt: skip
    return None


def typed(node: RayNode, facts: NodeFacts) -> RayNode:
    """Fill in the GPU type from the driver if flags and Ray omit it; speed estimates go by type."""
    unknown = node.gpus and not node.gpu_type and facts.gpus
    return replace(node, gpu_type=facts.gpus[0].name) if unknown else node


def unlike(one: Gpu, other: Gpu) -> bool:
    """Whether two GPUs differ in type or memory."""
    spread = abs(one.memory_bytes - other.memory_bytes) / max(one.memory_bytes, other.memory_bytes)
    return one.name != other.name or spread > _MEMORY_TOLERANCE


def gpus_text(facts: NodeFacts) -> str:
    """GPU types for display: ``NVIDIA L4 of 22 GiB``; empty if unknown."""
    return " and ".join(dict.fromkeys(_gpu_text(gpu) for gpu in facts.gpus))


def _gpu_text(gpu: Gpu) -> str:
    return f"{gpu.name} of {gpu.memory_bytes / 2**30:.0f} GiB"


@dataclass(slots=True)
class LearnerSlots:
    """Ray nodes that train, or will, with their rank counts.

    For all threads: ``by_node`` is replaced as a whole, never mutated.
    """

    by_node: Mapping[str, tuple[RayNode, int]]

    @classmethod
    def plan(cls, ranks: int, nodes: Sequence[RayNode]) -> LearnerSlots:
        """On reserved nodes: fewest nodes, then fewest slots left over. 0 ranks: they go to spot nodes.

        Raises ConfigError if there are fewer slots than ranks.
        """
        by_name = sorted(nodes, key=lambda node: node.name)
        slots = {node.ray_id: node.slots for node in by_name if node.kind is NodeKind.RESERVED}
        placed = choose_places(slots, ranks)
        if ranks and not placed:
            expected = f"at most {sum(slots.values())}, the slots of the reserved nodes"
            raise ConfigError(
                "the cluster",
                [Problem("fleet.learner_ranks", str(ranks), expected, "Lower it, or add a node.")],
            )
        return cls({node.ray_id: (node, placed[node.ray_id]) for node in nodes if node.ray_id in placed})


def _gpu_type(resources: Mapping[str, float], labels: Mapping[str, str]) -> str:
    by_resource = (
        name.removeprefix(_RAY_GPU_RESOURCE) for name in resources if name.startswith(_RAY_GPU_RESOURCE)
    )
    return labels.get(GPU_LABEL) or labels.get(_RAY_GPU_LABEL) or next(by_resource, "")


def _numbers(value: object) -> Mapping[str, float]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name): float(number) for name, number in items}


def _texts(value: object) -> Mapping[str, str]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name): str(text) for name, text in items}
