"""What a run on a cluster took, read from its ledger, metrics and checkpoints. Read-only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from sqlite3 import Connection

from spotlight.config.load import load_dump
from spotlight.config.schema import RunConfig
from spotlight.scheduler.types import NodeId, NodeKind, Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.metrics import MetricsRow, read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight_fleet.gpus import GPU_TYPES, unknown_gpu
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.file_errors import StoreError

_DENOISING = (Phase.ROLLOUT, Phase.EVALUATION, Phase.EXPLORATION)
_JOINED = re.compile(r"(\d+) x (.*)")
_AGAIN = re.compile(r"#\d+$")
"""A node that came back under its old name is billed as ``spot-0/0#2``."""
_SHORTEST = 3
"""Iterations of a run that tells anything: the first contains the start, and two more show a spread."""


@dataclass(frozen=True, slots=True)
class NodeIncident:
    """What happened to a node.

    Attributes:
        at: seconds since the epoch.
        detail: as the ledger has it.
    """

    kind: Incident
    node: NodeId
    at: float
    detail: str


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A node as it joined.

    Attributes:
        usd_h: of all of it, on average of its stays.
        trained: it had learner ranks.
    """

    kind: NodeKind
    gpus: int
    gpu_type: str
    usd_h: float
    trained: bool


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """Work of the workers on one GPU type.

    Attributes:
        denoise_s: GPU-seconds of accepted rollouts, evaluations and previews, of all members of a group.
        sample_steps: samples times their denoising steps, in these seconds.
        setup_s: GPU-seconds from a worker's start until it could work.
        starts: workers that came to work; one that came back counts again.
        pull_s: GPU-seconds in which workers waited for new weights.
        pulls: versions that they waited for, counted for each worker.
    """

    denoise_s: float = 0.0
    sample_steps: int = 0
    setup_s: float = 0.0
    starts: int = 0
    pull_s: float = 0.0
    pulls: int = 0


@dataclass(frozen=True, slots=True)
class LearnerTimes:
    """Work of the learner: seconds of all ranks together, as wall time.

    Attributes:
        train_s, samples: of the iterations after the first, in which everything warms up, up to the last
            that a checkpoint holds. Includes advantages and old log-probs.
        versions: published.
    """

    gpu_type: str
    train_s: float
    samples: int
    publish_s: float
    versions: int
    checkpoint_s: float
    checkpoints: int


@dataclass(frozen=True, slots=True)
class RunTimes:
    """A run's measurements.

    Attributes:
        label: name and day, for sources.
        rollouts: by GPU type.
        reward_wait_s: in which an iteration waited for rewards alone, on average.
        weight_bytes: of the exported adapter; the checkpoint's if there is none.
        state_bytes: of the newest checkpoint.
        iteration_ends_s: end of each iteration, from when the learner's first node had joined.
        usd: of the GPU-seconds after the first iteration.
        phase_s: GPU-seconds by phase.
        incidents: of the nodes, in order.
        prompts: training and held-out prompts used.
    """

    label: str
    config: RunConfig
    rollouts: Mapping[str, RolloutTimes]
    learner: LearnerTimes
    reward_wait_s: float
    weight_bytes: int
    state_bytes: int
    iteration_ends_s: tuple[float, ...]
    usd: float
    phase_s: Mapping[Phase, float]
    nodes: Mapping[NodeId, SeenNode]
    incidents: tuple[NodeIncident, ...]
    prompts: tuple[int, int]

    @property
    def iteration_s(self) -> float:
        """Mean time of the iterations after the first."""
        first, last = self.iteration_ends_s[0], self.iteration_ends_s[-1]
        return (last - first) / (len(self.iteration_ends_s) - 1)


def read_run_times(directory: Path) -> RunTimes:
    """Read what a run took; safe beside a running process.

    Raises:
        StoreError: not a run directory, or unreadable.
        ConfigError: a run that does not show what GPUs took: see :func:`_require_measurable`.
    """
    paths = RunPaths(directory)
    if not paths.config.is_file():
        raise StoreError(f"{directory}: not a run directory (no {paths.config.name}); see `spotlight runs`.")
    config = load_dump(paths.config)
    rows = [row for row in read_metrics(directory) if "train/step_s" in row.values]
    _require_measurable(directory.name, config, len(rows))
    with (
        closing(queries.open_readonly(paths.ledger)) as connection,
        queries.consistent_reading(connection),
    ):
        return _read(directory, config, rows, connection)


def _require_measurable(name: str, config: RunConfig, iterations: int) -> None:
    degrees = config.fleet.sequence_parallel.degrees
    problems = []
    if config.fleet.driver != "ray":
        remedy = "One process does not record which GPUs it used: calibrate with a run on a cluster."
        problems.append(Problem("fleet.driver", repr(config.fleet.driver), "'ray'", remedy))
    if config.fleet.learner_placement != "reserved":
        found = repr(config.fleet.learner_placement)
        remedy = "The nodes of a learner that moves are not told apart: calibrate with one that stays."
        problems.append(Problem("fleet.learner_placement", found, "'reserved'", remedy))
    if config.learner.mode != "lora":
        remedy = "Whole weights are pulled in what is recorded as set-up: calibrate with a run with a LoRA."
        problems.append(Problem("learner.mode", repr(config.learner.mode), "'lora'", remedy))
    if len(degrees) > 1:
        found, remedy = str(list(degrees)), "Seconds of different degrees are not told apart."
        problems.append(Problem("fleet.sequence_parallel.degrees", found, "one degree", remedy))
    if config.fleet.sequence_parallel.guidance:
        remedy = "A profile has no seconds of guidance made in parallel: calibrate with a run without it."
        problems.append(Problem("fleet.sequence_parallel.guidance", "true", "false", remedy))
    if iterations < _SHORTEST:
        remedy = "The first contains the start: let it train longer."
        problems.append(Problem("iterations", f"{iterations} done", f"{_SHORTEST} or more", remedy))
    if problems:
        raise ConfigError(f"the run {name}", problems)


def _read(directory: Path, config: RunConfig, rows: Sequence[MetricsRow], connection: Connection) -> RunTimes:
    started_at, finished = _attempt(connection, directory.name)
    ranks = _learner_slots(connection)
    saved = _saved_iterations(connection, directory.name, config, len(rows), finished=finished)
    warm = _warm(connection)
    nodes = _nodes(connection, directory.name, ranks)
    incidents = tuple(_incidents(connection, nodes))
    learner_at = [one.at for one in incidents if one.node in nodes and nodes[one.node].trained]
    began_s = max(0.0, min(learner_at, default=started_at) - started_at)
    state_bytes = max((_size(folder) for folder in (directory / "checkpoints").glob("*")), default=0)
    return RunTimes(
        label=f"run {directory.name} of {datetime.fromtimestamp(started_at, UTC).date().isoformat()}",
        config=config,
        rollouts=_rollouts(connection, nodes, ranks, warm),
        learner=_learner(connection, config, nodes, ranks, rows, saved, finished=finished),
        reward_wait_s=_mean(rows[1:], "rewards/wait_s"),
        weight_bytes=_size(directory / "lora") or state_bytes,
        state_bytes=state_bytes,
        iteration_ends_s=tuple(row.wall_s - began_s for row in rows),
        usd=_usd(connection, warm),
        phase_s=queries.gpu_seconds_by_phase(connection),
        nodes=nodes,
        incidents=incidents,
        prompts=(_prompts(connection, "train"), _prompts(connection, "eval")),
    )


def _attempt(connection: Connection, name: str) -> tuple[float, bool]:
    """When the run started, and whether it came to its end."""
    attempts = connection.execute("SELECT started_at, ended FROM attempts").fetchall()
    if len(attempts) != 1:
        remedy = "Nodes of different attempts have the same names: take a run that was never resumed."
        problem = Problem("attempts", str(len(attempts)), "one", remedy)
        raise ConfigError(f"the run {name}", [problem])
    return float(attempts[0][0]), attempts[0][1] == Ending.FINISHED


def _learner_slots(connection: Connection) -> set[str]:
    query = "SELECT DISTINCT worker FROM gpu_seconds WHERE 'training' IN (phase, was_phase)"
    return {worker for (worker,) in connection.execute(query)}


def _saved_iterations(
    connection: Connection, name: str, config: RunConfig, iterations: int, *, finished: bool
) -> int:
    """Iterations up to the last checkpoint: seconds of training are in the ledger once one holds them."""
    query = (
        "SELECT COUNT(DISTINCT iteration) FROM optimizer_steps"
        " WHERE seq <= (SELECT MAX(position) FROM gpu_seconds WHERE phase = 'training')"
    )
    every = config.checkpoint.every
    done = min(iterations, int(connection.execute(query).fetchone()[0]))
    saved = done if finished else done // every * every
    if saved < _SHORTEST:
        found, expected = f"{saved} of {iterations} iterations", f"{_SHORTEST} or more"
        remedy = (
            f"What training took is known up to a checkpoint, and checkpoint.every is {every}: let it train "
            "longer, or save more often."
        )
        raise ConfigError(f"the run {name}", [Problem("checkpoints", found, expected, remedy)])
    return saved


def _warm(connection: Connection) -> int:
    """Number of the record that ended the training of the first iteration."""
    query = "SELECT MAX(seq) FROM optimizer_steps WHERE iteration = 0"
    return int(connection.execute(query).fetchone()[0] or 0)


def _usd(connection: Connection, warm: int) -> float:
    query = "SELECT TOTAL(seconds * price_usd_h) / 3600 FROM gpu_seconds WHERE position > ?"
    return float(connection.execute(query, (warm,)).fetchone()[0])


def _nodes(connection: Connection, name: str, ranks: set[str]) -> dict[NodeId, SeenNode]:
    """Every node that ever joined. Raises :class:`ConfigError` for an unknown GPU type."""
    slot_usd_h: dict[NodeId, list[float]] = {}
    slots: dict[NodeId, set[str]] = {}
    for worker, price_usd_h in connection.execute("SELECT worker, price_usd_h FROM attempt_workers"):
        slot_usd_h.setdefault(_node_of(worker), []).append(price_usd_h)
        slots.setdefault(_node_of(worker), set()).add(_AGAIN.sub("", worker))
    training = {_node_of(worker) for worker in ranks}
    found: dict[NodeId, SeenNode] = {}
    for subject, spot, detail in connection.execute(
        "SELECT subject, spot, detail FROM incidents WHERE kind = ?", (Incident.NODE_JOINED.value,)
    ):
        joined = _JOINED.fullmatch(detail)
        gpus, gpu_type = (int(joined[1]), joined[2]) if joined else (0, "")
        if gpu_type not in GPU_TYPES:
            remedy = unknown_gpu(gpu_type) if gpu_type else "Its Ray node has no label of a GPU type."
            problem = Problem(f"node {subject}", repr(gpu_type), "a known GPU type", remedy)
            raise ConfigError(f"the run {name}", [problem])
        kind = NodeKind.SPOT if spot else NodeKind.RESERVED
        for node in _parts(subject, slots):
            prices, held = slot_usd_h.get(node, [0.0]), gpus if node == subject else len(slots[node])
            seen = SeenNode(kind, held, gpu_type, held * sum(prices) / len(prices), node in training)
            if found.setdefault(node, seen) != seen:
                both = f"{found[node].gpus} x {found[node].gpu_type}, then {detail}"
                remedy = "Their seconds are not told apart: take a run whose names are always the same kind."
                problem = Problem(f"node {node}", both, "the same GPUs each time", remedy)
                raise ConfigError(f"the run {name}", [problem])
    return found


def _parts(machine: str, billed: Iterable[NodeId]) -> list[NodeId]:
    """The nodes that a machine was: itself, or what trained of it and what rolled out."""
    return [node for node in billed if queries.machine_of(node) == machine] or [NodeId(machine)]


def _incidents(connection: Connection, nodes: Iterable[NodeId]) -> Iterator[NodeIncident]:
    kinds = (Incident.NODE_JOINED, Incident.NODE_NOTICED, Incident.NOTICE_CANCELLED, Incident.NODE_LOST)
    for kind, node, at, detail in connection.execute(
        "SELECT kind, subject, at, detail FROM incidents ORDER BY id"
    ):
        if kind in kinds:
            for part in _parts(node, nodes):
                yield NodeIncident(Incident(kind), part, at, detail)


def _rollouts(
    connection: Connection, nodes: Mapping[NodeId, SeenNode], ranks: set[str], warm: int
) -> dict[str, RolloutTimes]:
    """The denoising after the first iteration, in which everything warms up; other work of the whole run.

    Of a sequence-parallel group every member spends seconds, and the leader alone makes samples.
    """
    spent = {
        slot: seconds
        for slot, seconds in _spent(connection, warm).items()
        if slot not in ranks and any(_both(seconds, phase) for phase in _DENOISING)
    }
    made = _made(connection, warm)
    versions: dict[str, set[int]] = {}  # by node and stay
    for slot, (_, used) in made.items():
        versions.setdefault(_stay_of(slot), set()).update(used)
    found: dict[str, RolloutTimes] = {}
    for slot, seconds in spent.items():
        sample_steps, used = made.get(slot, (0, versions.get(_stay_of(slot), set())))
        gpu_type = nodes[_node_of(slot)].gpu_type
        before = found.get(gpu_type, RolloutTimes())
        found[gpu_type] = RolloutTimes(
            before.denoise_s + sum(seconds.get((phase, True), 0.0) for phase in _DENOISING),
            before.sample_steps + sample_steps,
            before.setup_s + _both(seconds, Phase.SETUP),
            before.starts + 1,
            before.pull_s + _both(seconds, Phase.WEIGHT_SYNC),
            before.pulls + max(0, len(used) - 1),  # the first comes with the start
        )
    return found


def _made(connection: Connection, warm: int) -> dict[str, tuple[int, set[int]]]:
    """By slot as it is billed: steps of its samples after the record ``warm``, and versions that it used."""
    stays: dict[str, list[tuple[int, str]]] = {}
    for slot, last in connection.execute(
        "SELECT worker, MAX(position) FROM gpu_seconds GROUP BY worker ORDER BY MAX(position)"
    ):
        stays.setdefault(_AGAIN.sub("", slot), []).append((last, slot))
    found: dict[str, tuple[int, set[int]]] = {}
    for seq, worker, version, steps in connection.execute(
        "SELECT samples.seq, worker, samples.version, rollouts.steps"
        " FROM samples JOIN rollouts ON rollouts.id = samples.rollout"
    ):
        billed = stays.get(worker, [(seq, worker)])
        slot = next((slot for last, slot in billed if seq <= last), billed[-1][1])
        sample_steps, versions = found.setdefault(slot, (0, set()))
        versions.add(version)
        found[slot] = sample_steps + steps * (seq > warm), versions
    return found


def _spent(connection: Connection, warm: int) -> dict[str, dict[tuple[Phase, bool], float]]:
    """Seconds of each slot by phase, and whether they came after the record ``warm``."""
    found: dict[str, dict[tuple[Phase, bool], float]] = {}
    for worker, phase, later, seconds in connection.execute(
        "SELECT worker, phase, position > ?, SUM(seconds) FROM gpu_seconds GROUP BY 1, 2, 3", (warm,)
    ):
        found.setdefault(worker, {})[Phase(phase), bool(later)] = seconds
    return found


def _both(spent: Mapping[tuple[Phase, bool], float], phase: Phase) -> float:
    return spent.get((phase, False), 0.0) + spent.get((phase, True), 0.0)


def _learner(
    connection: Connection,
    config: RunConfig,
    nodes: Mapping[NodeId, SeenNode],
    ranks: set[str],
    rows: Sequence[MetricsRow],
    saved: int,
    *,
    finished: bool,
) -> LearnerTimes:
    spent = [seconds for worker, seconds in _spent(connection, 0).items() if worker in ranks]

    def wall_s(phase: Phase) -> float:
        return sum(_both(seconds, phase) for seconds in spent) / config.fleet.learner_ranks

    later = "SELECT TOTAL(samples) FROM optimizer_steps WHERE iteration BETWEEN 1 AND ?"
    samples = connection.execute(later, (saved - 1,)).fetchone()[0]
    # The ledger has seconds by checkpoint, the metrics the learner's own by iteration.
    steps_s = [row.values["train/step_s"] for row in rows[:saved]]
    whole, rest = divmod(saved, config.checkpoint.every)
    versions = connection.execute("SELECT COUNT(*) FROM versions WHERE version > 0").fetchone()[0]
    return LearnerTimes(
        gpu_type=nodes[_node_of(min(ranks))].gpu_type,
        train_s=wall_s(Phase.TRAINING) * (1 - steps_s[0] / sum(steps_s)),
        samples=int(samples),
        publish_s=wall_s(Phase.WEIGHT_SYNC),
        versions=versions,
        checkpoint_s=wall_s(Phase.CHECKPOINT),
        checkpoints=whole + (finished and rest > 0),
    )


def _prompts(connection: Connection, purpose: str) -> int:
    query = "SELECT COUNT(DISTINCT prompt) FROM rollouts WHERE purpose = ?"
    return int(connection.execute(query, (purpose,)).fetchone()[0])


def _node_of(worker: str) -> NodeId:
    return NodeId(worker.rpartition("/")[0])


def _stay_of(slot: str) -> str:
    """``spot-0/3#2`` is of ``spot-0#2``."""
    again = _AGAIN.search(slot)
    return _node_of(slot) + (again[0] if again else "")


def _mean(rows: Sequence[MetricsRow], name: str) -> float:
    found = [row.values[name] for row in rows if name in row.values]
    return sum(found) / len(found) if found else 0.0


def _size(folder: Path) -> int:
    """Of files that are there: a running process removes old checkpoints meanwhile."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found += Path(place, name).stat().st_size
    return found
