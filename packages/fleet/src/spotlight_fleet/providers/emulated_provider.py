"""Nodes of a cluster that is emulated on this machine, spot or on demand.

A trace says which nodes a market offers at a time; the run takes as many of them as it asks for. A thread
starts them, one at a time, and takes another when the market takes one away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spotlight_fleet.providers.node_provider import ClusterNode, NodeProviderKind, ProviderSetting
from spotlight_fleet.providers.spot_offers import SpotOffers
from spotlight_rewards.base.strict_section import StrictSection

if TYPE_CHECKING:
    from spotlight_fleet.emulated.local_cluster import LocalCluster

log = logging.getLogger("spotlight.fleet.providers.emulated_provider")

_RETRY_S = 2.0


class EmulatedSettings(StrictSection):
    """It has none."""


class EmulatedProvider:
    """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`, and ``Machines`` of the market."""

    def __init__(self, cluster: LocalCluster, nodes: int, kind: str = "spot") -> None:
        self._cluster, self._kind = cluster, kind
        self._offers = SpotOffers(nodes)
        self._starting = ""
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._take_all, name="spot provider", daemon=True)
        self._thread.start()

    # -- the run ---------------------------------------------------------------------------------------

    def asked(self, present: Sequence[ClusterNode]) -> int:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""
        return self._offers.wanted

    def ask(self, nodes: int, present: Sequence[ClusterNode], leaving: Sequence[ClusterNode]) -> int:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""
        with self._changed:
            back = self._offers.want(nodes, {node.name for node in present}, {node.name for node in leaving})
            self._changed.notify()
        for name in back:
            self._end(name)
        return self._offers.wanted

    def close(self) -> None:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`: the cluster itself ends."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    # -- the market ------------------------------------------------------------------------------------

    def add(self, name: str, slots: int) -> None:
        """The market offers a node."""
        with self._changed:
            self._offers.offered[name] = slots
            self._changed.notify()

    def notice(self, name: str) -> None:
        """The market announces that it will take a node away."""
        from spotlight_fleet.emulated.local_cluster import LocalClusterError

        try:
            if name in self._offers.taken:
                self._cluster.notice(name)
        except LocalClusterError as error:
            log.warning("%s", error)

    def kill(self, name: str) -> None:
        """The market takes a node away."""
        with self._changed:
            had = self._offers.withdraw(name)
            self._changed.notify()
        if had:
            self._end(name)

    # -- nodes -----------------------------------------------------------------------------------------

    def _end(self, name: str) -> None:
        from spotlight_fleet.emulated.local_cluster import LocalClusterError

        if name == self._starting:
            return  # it ends once it is there
        try:
            self._cluster.kill(name)
        except LocalClusterError as error:
            log.warning("%s", error)

    def _take_all(self) -> None:
        from spotlight_fleet.emulated.local_cluster import LocalClusterError

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._next())
                if self._over:
                    return
                name, slots = self._starting, self._offers.offered[self._starting]
            failed = ""
            try:
                self._cluster.add_node(name, self._kind, slots)
            except LocalClusterError as error:
                failed = str(error)
                log.warning("%s", error)
            with self._changed:
                self._starting = ""
                kept = name in self._offers.taken and not failed
                if failed:
                    self._offers.taken.discard(name)
                    self._changed.wait_for(lambda: self._over, timeout=_RETRY_S)
            if not kept and not failed:
                self._end(name)

    def _next(self) -> bool:
        taken = self._offers.take()
        if taken is not None:
            self._starting = taken[0]
        return taken is not None


def _open(settings: EmulatedSettings, setting: ProviderSetting) -> EmulatedProvider:
    assert setting.emulated is not None, "checked with the configuration"
    return EmulatedProvider(setting.emulated, setting.nodes)


EMULATED = NodeProviderKind(EmulatedSettings, _open)
