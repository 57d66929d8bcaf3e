"""Assembles what holds a run's deadline and budget, from its configuration and its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotlight.cluster.cluster_accounts import ClusterAccounts
from spotlight.cluster.incidents import IncidentRecorder
from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.remote_calls import Notify
from spotlight.cluster.scaling.node_notes import NodeNotes
from spotlight.cluster.scaling.node_provider import ProviderSetting, SpotProvider
from spotlight.cluster.scaling.spot_scaler import ScalerLimits, SpotScaler, Workforce
from spotlight.config.schema import RunConfig
from spotlight.registry import NODE_PROVIDERS
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.members import ABLE
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.scaling.measured_rows import measured_before
from spotlight.scheduler.scaling.pace_meter import PaceMeter
from spotlight.scheduler.scaling.target_policy import TargetPolicy
from spotlight.scheduler.types import NodeKind
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunDirectory

if TYPE_CHECKING:
    from spotlight.cluster.cluster_nodes import ClusterNodes
    from spotlight.cluster.local.local_cluster import LocalCluster

NOTES_FILE = "spot-nodes.json"
_JOIN_S = 60.0
"""As long as an agent may take to start."""


def open_provider(
    config: RunConfig, directory: RunDirectory, emulated: LocalCluster | None, note: Notify
) -> SpotProvider | None:
    """Who provides the run's spot nodes; None: it has no deadline and no budget.

    Nodes that an earlier attempt started, and that nobody will end, are reported.
    """
    target, fleet = config.fleet.target, config.fleet
    notes = NodeNotes(directory.path / NOTES_FILE)
    if not target.is_set:
        notes.report("fleet.target", note)
        return None
    kind = NODE_PROVIDERS.load(target.provider_name)
    _, before = measured_before(row.values for row in read_metrics(directory.path))
    first = fleet.spot.emulated_nodes if before is None else before
    setting = ProviderSetting(emulated, target.clipped(first), notes, fleet.start_s)
    return kind.open(kind.settings.model_validate(target.params), setting)


def make_scaler(
    config: RunConfig,
    directory: RunDirectory,
    provider: SpotProvider,
    nodes: ClusterNodes,
    controller: Controller,
    accounts: ClusterAccounts,
    ledger: SqliteLedger,
    incidents: IncidentRecorder,
    before_run: Sequence[RayNode],
) -> SpotScaler:
    """What adds and drops the run's nodes. The deadline counts from its first attempt.

    Args:
        before_run: nodes that the cluster had before this attempt.
    """
    fleet, target = config.fleet, config.fleet.target
    measured, before = measured_before(row.values for row in read_metrics(directory.path))
    meter = PaceMeter(target.node_s, fleet.start_s)
    meter.recall(measured)
    deadline_at = None if target.deadline_h is None else ledger.began_at() + 3600 * target.deadline_h
    return SpotScaler(
        TargetPolicy(target.nodes_min, target.nodes_max),
        meter,
        provider,
        nodes,
        _Progress(config, nodes, controller.cluster, ledger, incidents),
        ScalerLimits(
            config.iterations, deadline_at, target.budget_usd, target.report_s, target.retry_s,
            move_s=fleet.start_s + fleet.learner_s, drain_s=fleet.lease_s, join_s=_JOIN_S,
        ),
        accounts.clock,
        wanted=None if before is None else target.clipped(before),
        done=controller.iteration,
        expected={node.ray_id for node in before_run if node.kind is NodeKind.SPOT},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Progress:
    config: RunConfig
    nodes: ClusterNodes
    cluster: Cluster
    ledger: SqliteLedger
    incidents: IncidentRecorder

    def workforce(self) -> Workforce:
        fleet = self.config.fleet
        return count_workforce(
            self.cluster, self.nodes, fleet.spot.slots, fleet.spot.slots * fleet.spot.price_usd_h
        )

    def spent_usd(self) -> float:
        return self.ledger.cost_usd()

    def decided(self, text: str) -> None:
        self.incidents.spot_target(text)

    def returned(self, node: RayNode) -> None:
        self.incidents.node_returned(node.name, self.nodes.known(node))


def count_workforce(cluster: Cluster, nodes: ClusterNodes, slots: int, node_usd_h: float) -> Workforce:
    """The nodes now. ``slots``, ``node_usd_h``: of a spot node, before there has been one."""
    workers = 0
    other_workers = other_usd_h = spot_usd_h = 0.0
    working: set[str] = set()
    for host in cluster.hosts.values():
        node = host.node
        able = 0 if host.draining else sum(cluster.workers[name].state in ABLE for name in host.workers)
        workers += able
        if node.kind is NodeKind.SPOT:
            spot_usd_h += node.price_usd_h
            other_workers -= node.gpus if node.trains and not node.rolls_out else 0
            if able or node.trains:
                working.add(nodes.machine_of(node.id))
        else:
            other_usd_h += node.price_usd_h
            other_workers += node.gpus if node.rolls_out else 0
    present = nodes.spot_nodes
    mean_slots = sum(node.slots for node in present) / len(present) if present else float(slots)
    mean_usd_h = spot_usd_h / len(present) if present else node_usd_h
    return Workforce(workers, len(working), present, other_workers, mean_slots, other_usd_h, mean_usd_h)
