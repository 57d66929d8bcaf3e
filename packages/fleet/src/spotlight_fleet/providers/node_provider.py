"""The interface of who adds and drops nodes; one of spot nodes is a file and a line in ``NODE_PROVIDERS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from spotlight_fleet.providers.node_notes import NodeNotes
from spotlight_rewards.base.strict_section import StrictSection

if TYPE_CHECKING:
    from spotlight_fleet.emulated.local_cluster import LocalCluster


class ProviderError(Exception):
    """A provider could not be asked, or refused; names what was found, what was expected and the remedy."""


class ClusterNode(Protocol):
    """A node in the cluster.

    Attributes:
        name: unique among living nodes.
        address: its IP.
    """

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str: ...


class NodeProvider(Protocol):
    """Nodes of a kind, spot or on demand. Calls come one at a time, in a thread, and may take minutes.

    What is asked for is a level, not a change: asking again for the same number repairs whatever was left
    undone, so that a call that failed loses nothing.
    """

    def asked(self, present: Sequence[ClusterNode]) -> int:
        """How many nodes it provides, or tries to. Raises ProviderError.

        Args:
            present: nodes of the kind in the cluster.
        """
        ...

    def ask(self, nodes: int, present: Sequence[ClusterNode], leaving: Sequence[ClusterNode]) -> int:
        """Provide so many; returns how many it provides, or tries to, from now on.

        If it does a part at a time, and returns fewer, it is asked again at once. A run that ends waits for
        the call.

        Where these are fewer, it ends nodes that have not joined yet, and those of ``leaving``, on which
        nothing works any more; never another one. So the number may stay larger than what was asked for.

        Args:
            present: nodes of the kind in the cluster; ``leaving``: some of them.

        Raises:
            ProviderError: it may have been done in part.
        """
        ...

    def close(self) -> None:
        """The attempt ends: provide nothing any more. Raises ProviderError."""
        ...


@dataclass(frozen=True, slots=True)
class ProviderSetting:
    """What a provider may use.

    Attributes:
        emulated: the cluster that is emulated on this machine; None: there is none.
        nodes: spot nodes to begin with, where there are none.
        notes: for the nodes that it has started.
        start_s: limit for a node to join.
    """

    emulated: LocalCluster | None
    nodes: int
    notes: NodeNotes
    start_s: float


@dataclass(frozen=True, slots=True)
class NodeProviderKind:
    """An entry of :data:`spotlight.registry.NODE_PROVIDERS`.

    Attributes:
        settings: model of ``fleet.target.params``.
        open: makes the provider, from settings of that model; it waits for nothing.
    """

    settings: type[StrictSection]
    open: Callable[[Any, ProviderSetting], NodeProvider]
