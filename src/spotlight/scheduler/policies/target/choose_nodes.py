"""How many spot nodes hold a deadline, a budget, or both.

    an iteration ends ─► model of the iterations ─► forecast for every number of nodes ─► which to ask for

Of the numbers that hold the goals by the upper end of their range: with a deadline the cheapest, with a
budget alone the fastest. If none does, the one that exceeds them least.

Invariants
    1. Nothing changes before ``iteration_model.MEASURED_MIN`` iterations are measured, nor before
       :data:`SETTLED_MIN` of them since the last change took effect.
    2. A step at most doubles, or halves, the number: what lies beyond was not measured.
    3. A number that holds the goals stays unless another saves :data:`GAIN_MIN`, twice in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spotlight.scheduler.policies.target.iteration_model import IterationModel
from spotlight.scheduler.policies.target.pace_meter import PaceMeter

SETTLED_MIN = 2
GAIN_MIN = 0.05
MARGIN = 0.05
"""Of the time or money left, kept free when a number is chosen."""
_ALIKE = 0.01
_RESCUE_MIN = 0.25
_STEADY = 2


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a run, and what its nodes bring and cost.

    Attributes:
        iterations: to train.
        left_s: to the deadline, negative after it; None: there is none.
        left_usd: of the budget, negative beyond it; None: there is none.
        asked: spot nodes that the fleet is asked to hold.
        other_workers: rollout workers that are not on spot nodes, less spot slots that the learner holds.
        node_workers: that a spot node brings.
        other_usd_h: of all nodes that are not spot.
        node_usd_h: of a spot node.
    """

    iterations: int
    left_s: float | None
    left_usd: float | None
    asked: int
    other_workers: float
    node_workers: float
    other_usd_h: float
    node_usd_h: float

    @property
    def lost(self) -> bool:
        """Whether no goal can be held any more."""
        return all(left is None or left <= 0 for left in (self.left_s, self.left_usd))

    @property
    def alive(self) -> Rest:
        """The same without a goal that is lost already, unless all are: it decides nothing any more."""
        if self.lost:
            return self
        left_s, left_usd = (
            None if left is not None and left <= 0 else left for left in (self.left_s, self.left_usd)
        )
        return replace(self, left_s=left_s, left_usd=left_usd)


@dataclass(frozen=True, slots=True)
class RestForecast:
    """What the rest takes and costs with so many spot nodes asked for; ``spread``: relative half-width."""

    nodes: int
    seconds: float
    usd: float
    spread: float

    @property
    def range_s(self) -> tuple[float, float]:
        """Seconds of nine in ten outcomes."""
        return self.seconds / (1 + self.spread), self.seconds * (1 + self.spread)

    @property
    def range_usd(self) -> tuple[float, float]:
        """Dollars of nine in ten outcomes."""
        return self.usd / (1 + self.spread), self.usd * (1 + self.spread)


@dataclass(frozen=True, slots=True)
class TargetDecision:
    """What to ask for.

    Attributes:
        nodes: spot nodes that the fleet is to hold next.
        now, then: the rest with what is asked for already, and with ``nodes``.
        best: with what the goals want in the end, which may be several steps away.
        holds: ``best`` holds the goals that are not lost already.
        reachable: none is lost, and ``best`` holds them.
    """

    nodes: int
    now: RestForecast
    then: RestForecast
    best: RestForecast
    holds: bool
    reachable: bool


@dataclass(slots=True)
class NodesChooser:
    """See the module's docstring."""

    nodes_min: int
    nodes_max: int
    _leaning: int = 0
    _leant: int = 0

    def outlook(self, rest: Rest, meter: PaceMeter) -> TargetDecision | None:
        """The rest as it is, without a change; None: too little is measured to say anything."""
        model = meter.model
        if model is None or rest.iterations <= 0:
            return None
        options = [forecast(rest, model, meter, nodes) for nodes in range(self.nodes_min, self.nodes_max + 1)]
        best, holds = choose(options, rest.alive)
        now = forecast(rest, model, meter, rest.asked)
        return TargetDecision(rest.asked, now, now, best, holds, holds and rest.alive == rest)

    def decide(self, rest: Rest, meter: PaceMeter) -> TargetDecision | None:
        """Call it after each iteration; None as for :meth:`outlook`."""
        if (found := self.outlook(rest, meter)) is None:
            return None
        worth = self._worth(rest.alive, found)
        nodes = self._step(rest, found.best, meter) if worth else rest.asked
        nodes = min(max(nodes, self.nodes_min), self.nodes_max)
        if nodes == rest.asked or (model := meter.model) is None:
            return found
        return replace(found, nodes=nodes, then=forecast(rest, model, meter, nodes))

    def _worth(self, alive: Rest, found: TargetDecision) -> bool:
        """Whether the best option is enough better twice in a row.

        Or once, where what is asked for exceeds the goals, and the best holds them or is better by far.
        """
        now, best = found.now, found.best
        better = _better(alive, holds=found.holds)
        exceeds = _share(now.seconds, now.usd, alive) > 1
        rescues = exceeds and (found.holds or better(best) < (1 - _RESCUE_MIN) * better(now))
        if best.nodes == alive.asked or (not rescues and better(best) > (1 - GAIN_MIN) * better(now)):
            self._lean(0)
            return False
        self._lean(1 if best.nodes > alive.asked else -1)
        return rescues or self._leant >= _STEADY

    def _lean(self, direction: int) -> None:
        self._leant = self._leant + 1 if direction == self._leaning and direction else abs(direction)
        self._leaning = direction

    def _step(self, rest: Rest, best: RestForecast, meter: PaceMeter) -> int:
        if meter.settled < SETTLED_MIN:
            return rest.asked
        self._lean(0)
        if best.nodes > rest.asked:
            return min(best.nodes, max(2 * rest.asked, 1))
        return max(best.nodes, rest.asked // 2)


def forecast(rest: Rest, model: IterationModel, meter: PaceMeter, nodes: int) -> RestForecast:
    """The rest with ``nodes`` asked for from now on; nodes that are new work, and cost, after a delay."""
    served = [meter.served(asked) for asked in (rest.asked, nodes)]
    workers = [rest.other_workers + rest.node_workers * each for each in served]
    now_s, then_s = map(model.seconds, workers)
    delay_s = meter.delay_s if nodes > rest.asked else 0.0
    made = min(rest.iterations, delay_s / now_s)
    seconds = made * now_s if made == rest.iterations else delay_s + (rest.iterations - made) * then_s
    # A node costs from joining on, which is some time before it works: counted as if from the beginning.
    usd_h = rest.other_usd_h + rest.node_usd_h * served[1]
    usd = seconds * usd_h / 3600 if math.isfinite(seconds) else math.inf
    return RestForecast(nodes, seconds, usd, model.spread_of(rest.iterations, workers[1]))


def choose(options: Sequence[RestForecast], alive: Rest) -> tuple[RestForecast, bool]:
    """The option that goals which are not lost want, and whether it holds them."""
    holding = [each for each in options if _share(each.range_s[1], each.range_usd[1], alive) <= 1 - MARGIN]
    better = _better(alive, holds=bool(holding))
    least = min(better(each) for each in holding or options)
    alike = [each for each in holding or options if better(each) <= (1 + _ALIKE) * least]
    return min(alike, key=lambda each: each.nodes), bool(holding)


def _better(alive: Rest, *, holds: bool) -> Callable[[RestForecast], float]:
    """What should be little: a deadline that is held should cost little, one that is not makes haste; a
    budget: the reverse; both out of reach: by what factor they are exceeded.
    """
    if holds:
        return _usd if alive.left_s is not None else _seconds
    if alive.left_usd is None:
        return _seconds
    if alive.left_s is None or alive.lost:
        return _usd
    return lambda each: _share(each.seconds, each.usd, alive)


def _share(seconds: float, usd: float, rest: Rest) -> float:
    """The largest share of what is left that so much is; above 1: more than there is."""
    return max(
        math.inf if left <= 0 else needed / left
        for needed, left in ((seconds, rest.left_s), (usd, rest.left_usd))
        if left is not None
    )


def _seconds(each: RestForecast) -> float:
    return each.seconds


def _usd(each: RestForecast) -> float:
    return each.usd
