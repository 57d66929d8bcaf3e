"""Measures a run's iterations, and how long a node takes from being asked for to working. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from spotlight.scheduler.policies.target.iteration_model import WINDOW, IterationModel, MeasuredIteration

_SERVED_MIN = 0.75
"""A smaller share of the nodes asked for that works is a market without more of them, not their coming and
going."""
_DELAYS = 3
_MARKET = 5
"""Newest iterations that tell how many nodes the market has."""


@dataclass(slots=True)
class PaceMeter:
    """Told of every change, or often; times are those of one clock.

    Attributes:
        node_s: assumed from asking for a node to its work, until measured.
        patience_s: a node that takes longer than this does not come.
        iterations: measured ones, of earlier attempts too, the oldest first.
    """

    node_s: float
    patience_s: float
    iterations: list[MeasuredIteration] = field(default_factory=list)
    _since_s: float | None = None
    _in_a_row: int = 0
    """The newest of ``iterations`` that this attempt measured one right after the other."""
    _seen_s: float = 0.0
    _workers: int = 0
    _nodes: int = 0
    _worker_s: float = 0.0
    _spot_node_s: float = 0.0
    _work_s: float = 0.0
    """Of iterations that are made again."""
    _delays_s: list[float] = field(default_factory=list)
    _asked: int | None = None
    _asked_s: float = 0.0
    _awaited: int = 0
    _timed: bool = False
    """Whether what is awaited was asked for just now, by a run that was ready for it."""
    _settled: bool = True

    def begin(self, now_s: float, asked: int) -> None:
        """The run begins or goes on: what comes until the first publication is no iteration."""
        self._asked, self._asked_s, self._seen_s = asked, now_s, now_s
        self._awaited, self._timed, self._settled = asked, False, not asked

    def observe(self, now_s: float, workers: int, spot_nodes: int) -> None:
        """So many workers can roll out, and so many spot nodes work, from now on."""
        self._account(now_s)
        self._workers, self._nodes = workers, spot_nodes
        if self._awaited and spot_nodes >= self._awaited:
            if self._timed:
                self._delays_s = [*self._delays_s, now_s - self._asked_s][-_DELAYS:]
            self._awaited = 0
        elif self._awaited and now_s - self._asked_s > self.patience_s:
            self._awaited = 0

    def ask(self, now_s: float, asked: int) -> None:
        """Another number of spot nodes is asked for."""
        assert self._asked is not None, "begun"
        if asked != self._asked:
            self._awaited = asked if asked > max(self._asked, self._nodes) else 0
            self._asked, self._asked_s, self._settled, self._timed = asked, now_s, False, True

    def end_iteration(self, now_s: float, work_s: float) -> MeasuredIteration | None:
        """A version is published; None: nothing was published before in this attempt.

        Args:
            work_s: worker-seconds of rollouts since the last one.
        """
        self._account(now_s)
        since_s, self._since_s = self._since_s, now_s
        worker_s, self._worker_s = self._worker_s, 0.0
        node_s, self._spot_node_s = self._spot_node_s, 0.0
        work_s, self._work_s = work_s + self._work_s, 0.0
        settled, self._settled = self._settled, not self._awaited
        if since_s is None or now_s <= since_s:
            self._in_a_row = 0
            return None
        seconds = now_s - since_s
        asked = self._asked if settled else None
        measured = MeasuredIteration(seconds, worker_s / seconds, work_s, node_s / seconds, asked)
        self.iterations = [*self.iterations, measured][-2 * WINDOW :]
        self._in_a_row = min(self._in_a_row + 1, len(self.iterations))
        return measured

    def recall(self, iterations: Iterable[MeasuredIteration]) -> None:
        """What an earlier attempt measured."""
        self.iterations = [*iterations][-2 * WINDOW :]

    def interrupt(self, undone: int) -> None:
        """So many iterations, and what is under way, are made again.

        The first that is made again takes their time, too: what losses cost is part of what iterations take.
        """
        again = self.iterations[len(self.iterations) - min(undone, self._in_a_row) :]
        self.iterations = self.iterations[: len(self.iterations) - len(again)]
        if self._since_s is None or undone > self._in_a_row:
            self._since_s = None  # when the first of them began was not measured
        else:
            self._since_s -= sum(each.seconds for each in again)
            self._worker_s += sum(each.workers * each.seconds for each in again)
            self._spot_node_s += sum(each.spot_nodes * each.seconds for each in again)
            self._work_s += sum(each.work_s for each in again)
            self._settled = self._settled and all(each.asked == self._asked for each in again)
        self._in_a_row -= len(again)

    @property
    def model(self) -> IterationModel | None:
        """The fit to the newest iterations; None: too few."""
        return IterationModel.fitted(self.iterations)

    @property
    def delay_s(self) -> float:
        """Seconds from asking for a node to its work."""
        return statistics.median(self._delays_s) if self._delays_s else self.node_s

    @property
    def settled(self) -> int:
        """Iterations measured since the number of nodes asked for took effect."""
        count = 0
        for each in reversed(self.iterations):
            if each.asked is None or each.asked != self._asked:
                break
            count += 1
        return count

    def served(self, asked: int) -> float:
        """Spot nodes expected to work of so many that are asked for.

        They come and go in a constant share. Where the market had no more, it will have no more.
        """
        known = [(each.spot_nodes, each.asked) for each in self.iterations if each.asked][-_MARKET:]
        if not known:
            return float(asked)
        worked, wanted = (statistics.fmean(each) for each in zip(*known, strict=True))
        if worked >= _SERVED_MIN * wanted:
            return asked * min(1.0, worked / wanted)
        return min(float(asked), worked)

    def _account(self, now_s: float) -> None:
        elapsed_s, self._seen_s = max(0.0, now_s - self._seen_s), now_s
        self._worker_s += elapsed_s * self._workers
        self._spot_node_s += elapsed_s * self._nodes
