"""The types of preemption notices, and the controller events they become. Pure.

A *source* (a cloud's metadata service, a signal) answers with a :class:`NoticeReading`: everything that is
pending now. The board (``board.py``) compares readings and reports changes as a :data:`Notice`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from spotlight.scheduler.events import NodeNoticed, NoticeCancelled
from spotlight.scheduler.types import NodeId

if TYPE_CHECKING:
    from spotlight.fleet.notices.metadata import MetadataServer


class NoticeError(Exception):
    """Notices cannot be watched as asked: a wrong address, no cloud, a signal outside the main thread."""


class NoticeTrouble(StrEnum):
    """What is wrong with a metadata service."""

    ABSENT = "absent"
    REFUSED = "refused"
    BROKEN = "broken"


class MetadataError(NoticeError):
    """A metadata service is silent (``ABSENT``), refuses (``REFUSED``) or answers nonsense (``BROKEN``)."""

    def __init__(self, trouble: NoticeTrouble, message: str) -> None:
        super().__init__(message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class PendingNotice:
    """An announced end of this node.

    Attributes:
        key: names the announcement within its source, for as long as it stands.
        stamp: the deadline as the source wrote it. The same key and stamp are the same notice, however the
            remaining time was computed.
        remaining_s: until the deadline, at the time of the reading; at least 0.
        detail: for people.
    """

    key: str
    stamp: str
    remaining_s: float
    detail: str


@dataclass(frozen=True, slots=True)
class NoticeReading:
    """All that a source knows now.

    Attributes:
        pending: announcements that stand; one that is missing from the next reading was cancelled.
        rebalance: the cloud sees an elevated risk, and since when; empty: it said nothing of the kind.
        trouble: a part of the answer that is of no consequence for ``pending`` could not be had.
    """

    pending: tuple[PendingNotice, ...] = ()
    rebalance: str = ""
    trouble: MetadataError | None = None


class NoticeSource(Protocol):
    """Where notices come from: one cloud's metadata service, or a signal."""

    @property
    def name(self) -> str:
        """For logs, and in the notices."""
        ...

    @property
    def period_s(self) -> float:
        """Shortest time between the beginnings of two readings."""
        ...

    async def read(self) -> NoticeReading | None:
        """What is pending now; may wait until that has changed. None: nothing more will ever come.

        Raises:
            MetadataError: nothing is known; what was pending still is.
        """
        ...

    async def acknowledge(self) -> bool:
        """Tell the cloud that this node is drained and need not be kept. False: there is nobody to tell.

        Raises:
            MetadataError: the cloud did not take it.
        """
        ...


class CloudSource(NoticeSource, Protocol):
    """A source that can tell whether this is its cloud."""

    async def probe(self) -> None:
        """One quick question that only this cloud answers. Raises :class:`MetadataError`."""
        ...


@dataclass(frozen=True, slots=True)
class Cloud:
    """What can be asked of a cloud; named in :data:`spotlight.registry.CLOUDS`.

    Attributes:
        notices: its preemption notices, from its usual address or another server.
        prices: ``module:function`` from a :class:`~spotlight.planning.prices.sources.PriceQuery` to its price
            list (a tuple of quotes), or that function; None: it publishes none.
    """

    notices: Callable[[MetadataServer], CloudSource]
    prices: str | Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Noticed:
    """This node will be taken. One that follows without a cancellation in between moves the deadline ahead.

    Attributes:
        deadline_s: on the watcher's clock (``time.monotonic`` of this machine).
    """

    source: str
    deadline_s: float
    detail: str

    def remaining_s(self, now_s: float) -> float:
        """Seconds left at ``now_s`` on the watcher's clock; at least 0."""
        return max(0.0, self.deadline_s - now_s)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """This node will not be taken after all; a notice may follow that puts the deadline off."""

    source: str
    detail: str


@dataclass(frozen=True, slots=True)
class Rebalance:
    """The cloud advises to move: the risk of a preemption is elevated. There is no deadline."""

    source: str
    detail: str


Notice: TypeAlias = Noticed | Cancelled | Rebalance


def controller_event(
    notice: Notice, node: NodeId, watcher_now_s: float, controller_now_s: float
) -> NodeNoticed | NoticeCancelled | None:
    """The event for the controller about ``node``; None for advice, on which it does not act.

    Args:
        watcher_now_s: when the notice was sent, on the watcher's clock.
        controller_now_s: when it came, on the controller's. Only remaining seconds cross machines: their
            clocks have nothing in common.
    """
    match notice:
        case Noticed():
            return NodeNoticed(node, controller_now_s + notice.remaining_s(watcher_now_s))
        case Cancelled():
            return NoticeCancelled(node)
        case Rebalance():
            return None
