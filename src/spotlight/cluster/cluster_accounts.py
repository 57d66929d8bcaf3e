"""Cost accounting: writes the GPU-seconds of every slot to the run's ledger.

A node that comes back under its old name is a new worker in the ledger: ``spot-0/0``, then ``spot-0/0#2``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from spotlight.cluster.billing import Billing, changed_machines
from spotlight.cluster.remote_calls import Clock
from spotlight.runtime.observer import Observer
from spotlight.runtime.recorder import RunRecorder
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import NodeId, Phase, WorkerId
from spotlight.store.ledger.sqlite_ledger import GpuSpend

FLUSH_S = 5.0
"""Most time until records are in the ledger; bills of a small cluster are written as often."""
BILL_S_MAX = 60.0
"""Most time between two bills: what a killed head can leave unaccounted."""
SLOTS_BILLED_A_SECOND = 10.0
"""Larger clusters are billed more rarely than every :data:`FLUSH_S`: a bill is a row or two of every slot."""


@dataclass(slots=True)
class ClusterAccounts:
    """Writes what :class:`Billing` settles. Head's event loop only.

    Attributes:
        written_s: time on ``clock`` up to which all settled seconds are in the ledger.
    """

    clock: Clock
    observer: Observer
    billing: Billing = field(default_factory=Billing)
    written_s: float = 0.0
    _flushed_s: float = 0.0
    _epoch_s: float = 0.0
    _billed_as: dict[WorkerId, WorkerId] = field(default_factory=dict)
    _joined: dict[NodeId, int] = field(default_factory=dict)
    _seconds: defaultdict[Phase, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self.written_s = self._flushed_s = self.clock()
        # One clock for all billing: totals of two clocks would not add up.
        self._epoch_s = time.time() - self.written_s

    def observe(
        self, event: ev.Event, effects: Sequence[ef.Effect], now: float, recorder: RunRecorder
    ) -> None:
        """Account for one controller event and its effects."""
        changed = changed_machines(event, effects)
        ended = [node for machine in changed for node in self.billing.nodes_on(machine)]
        self.billing.observe(event, effects, now)
        for node in ended:
            self._stop_billing(node, now, recorder)
        for part in (part for parts in changed.values() for part in parts):
            self._start_billing(part.id, now, recorder)

    def write_due(self, recorder: RunRecorder) -> float:
        """Write records, and seconds, if it is time to; returns when to call again, on ``clock``."""
        bill_s = min(max(FLUSH_S, len(self._billed_as) / SLOTS_BILLED_A_SECOND), BILL_S_MAX)
        if (now := self.clock()) >= self.written_s + bill_s:
            self.write(recorder)
        elif now >= self._flushed_s + FLUSH_S:
            recorder.flush()
            self._flushed_s = now
        return min(self.written_s + bill_s, self._flushed_s + FLUSH_S)

    def write(self, recorder: RunRecorder) -> None:
        """Write all seconds settled since the last call."""
        now = self.clock()
        self._spend(recorder, self.billing.take(now), now)
        self.observer.billed(recorder.ledger.cost_usd())

    def finish(self, recorder: RunRecorder) -> None:
        """Close the attempt's accounts: seconds still at risk are lost."""
        now = self.clock()
        self._spend(recorder, self.billing.finish(now), now)

    def take_seconds(self) -> dict[Phase, float]:
        """GPU-seconds by phase written since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _spend(self, recorder: RunRecorder, spends: Iterable[GpuSpend], now: float) -> None:
        elapsed_s, self.written_s, self._flushed_s = now - self.written_s, now, now
        self._bill(recorder, spends, elapsed_s)

    def _bill(self, recorder: RunRecorder, spends: Iterable[GpuSpend], elapsed_s: float) -> None:
        rows = [replace(spent, worker=self._billed_as[spent.worker]) for spent in spends]
        for row in rows:
            self._seconds[row.phase] += row.seconds
        recorder.bill(rows, elapsed_s, self._epoch_s + self.written_s)

    def _start_billing(self, node: NodeId, now: float, recorder: RunRecorder) -> None:
        times = self._joined[node] = self._joined.get(node, 0) + 1
        prices = self.billing.price_of(node)
        names = {slot: WorkerId(f"{slot}#{times}") if times > 1 else slot for slot in prices}
        self._billed_as |= names
        recorder.ledger.start_billing(
            {names[slot]: price for slot, price in prices.items()}, self._epoch_s + now
        )

    def _stop_billing(self, node: NodeId, now: float, recorder: RunRecorder) -> None:
        slots = [slot for slot in self._billed_as if slot.rpartition("/")[0] == node]
        if slots:
            # Not those of all slots: on a large cluster nodes are lost more often than bills are due.
            self._bill(recorder, self.billing.take_gone(), 0.0)
            recorder.ledger.stop_billing([self._billed_as.pop(slot) for slot in slots], self._epoch_s + now)
