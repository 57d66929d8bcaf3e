"""Types of preemption notices. Pure.

A *source* (metadata service or signal) returns a :class:`NoticeReading` of everything pending. The board
(``board.py``) compares readings and reports each change as a :data:`Notice`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from spotlight_rewards.base.errors import UserError

if TYPE_CHECKING:
    from spotlight_fleet.notices.metadata import MetadataServer


class NoticeError(UserError):
    """Notices cannot be watched: a wrong address, no cloud, a signal outside the main thread."""


class NoticeTrouble(StrEnum):
    """Failure of a metadata service."""

    ABSENT = "absent"
    REFUSED = "refused"
    BROKEN = "broken"


class MetadataError(NoticeError):
    """The service is silent (``ABSENT``), refuses (``REFUSED``) or sends an invalid answer (``BROKEN``)."""

    def __init__(self, trouble: NoticeTrouble, message: str) -> None:
        super().__init__(message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class PendingNotice:
    """An announced end of this node.

    Attributes:
        key: identifies the announcement within its source.
        stamp: the deadline as the source wrote it. Key and stamp identify a notice, whatever the computed
            remaining time.
        remaining_s: seconds from the reading to the deadline, at least 0.
        detail: for people.
    """

    key: str
    stamp: str
    remaining_s: float
    detail: str


@dataclass(frozen=True, slots=True)
class NoticeReading:
    """Everything a source reports.

    Attributes:
        pending: current announcements; one missing from the next reading was cancelled.
        rebalance: elevated preemption risk, and since when; empty: none reported.
        trouble: failure of a part that does not affect ``pending``.
    """

    pending: tuple[PendingNotice, ...] = ()
    rebalance: str = ""
    trouble: MetadataError | None = None


class NoticeSource(Protocol):
    """A source of notices: a cloud's metadata service, or a signal."""

    @property
    def name(self) -> str:
        """Name in logs and notices."""
        ...

    @property
    def period_s(self) -> float:
        """Minimum time between the starts of two readings."""
        ...

    async def read(self) -> NoticeReading | None:
        """What is pending; may wait until that changes. None: the source has ended.

        Raises:
            MetadataError: the reading failed; the last one still holds.
        """
        ...

    async def acknowledge(self) -> bool:
        """Report that this node is drained and may be taken. False: nothing to report to.

        Raises:
            MetadataError: the cloud rejected it.
        """
        ...


class CloudSource(NoticeSource, Protocol):
    """A source that can detect its cloud."""

    async def probe(self) -> None:
        """Send a quick request that only this cloud answers. Raises :class:`MetadataError`."""
        ...


@dataclass(frozen=True, slots=True)
class Cloud:
    """A cloud's services; registered in :data:`spotlight_fleet.notices.registry.CLOUDS`.

    Attributes:
        notices: builds its notice source for a metadata server.
        prices: ``module:function``, or a function, from a
            :class:`~spotlight_plan.prices.sources.PriceQuery` to a tuple of quotes; None: no price list.
    """

    notices: Callable[[MetadataServer], CloudSource]
    prices: str | Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Noticed:
    """This node will be preempted. A second one without a cancellation moves the deadline forward.

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
    """The preemption was cancelled; a notice with a later deadline may follow."""

    source: str
    detail: str


@dataclass(frozen=True, slots=True)
class Rebalance:
    """The cloud reports an elevated preemption risk, without a deadline."""

    source: str
    detail: str


Notice: TypeAlias = Noticed | Cancelled | Rebalance
