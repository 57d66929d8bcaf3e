"""Who provides the nodes that come and go as a run wants, by its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotlight.cluster.remote_calls import Notify
from spotlight.config.schema import RunConfig
from spotlight.registry import NODE_PROVIDERS
from spotlight.scheduler.types import NodeKind
from spotlight.store.run_directory import RunDirectory
from spotlight_fleet.providers.command_provider import CommandProvider
from spotlight_fleet.providers.emulated_provider import EmulatedProvider
from spotlight_fleet.providers.node_notes import NodeNotes
from spotlight_fleet.providers.node_provider import NodeProvider, ProviderSetting

if TYPE_CHECKING:
    from spotlight_fleet.emulated.local_cluster import LocalCluster

SPOT_NOTES, ON_DEMAND_NOTES = "spot-nodes.json", "on-demand-nodes.json"


def open_providers(
    config: RunConfig, directory: RunDirectory, emulated: LocalCluster | None, note: Notify
) -> dict[NodeKind, NodeProvider]:
    """By kind of node; empty: the run neither adds nor drops any.

    Nodes that an earlier attempt started, and that nobody will end, are reported.
    """
    providers: dict[NodeKind, NodeProvider] = {}
    spot, on_demand = (NodeNotes(directory.path / name) for name in (SPOT_NOTES, ON_DEMAND_NOTES))
    fleet, target = config.fleet, config.fleet.target
    if target.is_set:
        kind = NODE_PROVIDERS.load(target.provider_name)
        setting = ProviderSetting(emulated, target.clipped(fleet.spot.emulated_nodes), spot, fleet.start_s)
        providers[NodeKind.SPOT] = kind.open(kind.settings.model_validate(target.params), setting)
    else:
        spot.report("fleet.target", note)
    if fleet.learner_placement == "spot_then_on_demand":
        providers[NodeKind.ON_DEMAND] = _on_demand(config, emulated, on_demand)
    else:
        on_demand.report("fleet.learner_placement=spot_then_on_demand", note)
    return providers


def _on_demand(config: RunConfig, emulated: LocalCluster | None, notes: NodeNotes) -> NodeProvider:
    ranks, settings = config.fleet.learner_ranks, config.fleet.on_demand
    if emulated is not None:
        provider = EmulatedProvider(emulated, 0, NodeKind.ON_DEMAND)
        provider.add("on-demand", ranks)
        return provider
    assert settings.start is not None
    assert settings.stop is not None
    return CommandProvider(
        settings.start,
        settings.stop,
        notes,
        config.fleet.start_s,
        keys="fleet.on_demand",
        prefix="on-demand",
        variables={"SPOTLIGHT_SLOTS": str(ranks)},
    )
