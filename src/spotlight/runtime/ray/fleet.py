"""From ``fleet``'s keys to a cluster this process is connected to, and a spot market that is played on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spotlight.config.fleet import FleetConfig
from spotlight.core.types import NodeKind
from spotlight.fleet.traces.events import Trace
from spotlight.fleet.traces.readers import read_trace
from spotlight.fleet.traces.transforms import repeat
from spotlight.runtime.ray.connection import connected
from spotlight.runtime.ray.local import LocalCluster, local_cluster
from spotlight.runtime.ray.market import LocalMachines, Market
from spotlight.runtime.ray.market_book import timed
from spotlight.runtime.ray.membership import MembershipSettings
from spotlight.runtime.ray.notice_watch import NoticeSettings

_PLAYED_S = 2 * 86400.0
"""A market of a local Ray is open for so long, repeating its trace; then its nodes stay as they are."""


@contextmanager
def cluster_of(fleet: FleetConfig) -> Iterator[LocalCluster | None]:
    """Be connected to the cluster within the block; the local one that was started for it, if any.

    Raises:
        ConfigError: it cannot be joined or started.
        LocalClusterError: one of its nodes did not start.
    """
    if fleet.address is not None:
        with connected(fleet.address):
            yield None
        return
    with local_cluster(fleet.local.reserved_slots, "reserved-0") as cluster, connected(cluster.address):
        for index in range(1, fleet.local.reserved_nodes):
            cluster.add_node(f"reserved-{index}", NodeKind.RESERVED, fleet.local.reserved_slots)
        for index in range(fleet.spot.nodes):
            cluster.add_node(f"spot-{index}", NodeKind.SPOT, fleet.spot.slots)
        yield cluster


@contextmanager
def market_of(fleet: FleetConfig, cluster: LocalCluster | None) -> Iterator[Market | None]:
    """Play ``fleet.spot.trace`` on the local cluster within the block; None: there is no trace.

    Raises:
        TraceError: the trace cannot be used.
    """
    if fleet.spot.trace is None or cluster is None:
        yield None
        return
    with Market(played_trace(fleet), LocalMachines(cluster)) as market:
        yield market


def played_trace(fleet: FleetConfig) -> Trace:
    """``fleet.spot.trace`` in real seconds, over and over. Raises :class:`TraceError`."""
    spot = fleet.spot
    assert spot.trace is not None
    trace = read_trace(Path(spot.trace), gpus_per_node=spot.slots)
    return timed(repeat(trace, _PLAYED_S * spot.speed), spot.speed, spot.notice_s)


def membership_settings(fleet: FleetConfig) -> MembershipSettings:
    """Where nodes hear of their end, and how long the head waits for them.

    On a local Ray that is SIGTERM, as long ahead as ``fleet.spot.notice_s`` says.
    """
    if fleet.address is None:
        notices = NoticeSettings("none", None, fleet.spot.notice_s)
    else:
        told = fleet.notices
        notices = NoticeSettings(told.cloud, told.endpoint, told.sigterm_grace_s)
    return MembershipSettings(notices, answer_s=fleet.answer_s, start_s=fleet.start_s)
