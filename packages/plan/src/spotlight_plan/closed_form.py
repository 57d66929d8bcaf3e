"""How long a run takes and what it costs, in closed form: ranks candidates before any is simulated. Pure.

How long an iteration lasts is :mod:`spotlight_plan.iteration_form`'s. The rate of iterations follows the
number of spot nodes along the first :data:`HORIZON_H` hours of the trace, and their mean beyond.

Left out: what the loss of a node that is not the learner's costs beyond the node (repeated steps), and noise.
How near it comes to the exact simulation: ``python -m benchmarks.plan_ranking``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from spotlight_plan.compare import SimulationOutcome
from spotlight_plan.iteration_form import IterationForm, IterationPace
from spotlight_plan.learning_speed import Explored, honest_target, learned_target
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.presence import Figures, Presence, steady
from spotlight_plan.scenarios.scenario_sections import Target
from spotlight_plan.scenarios.side_costs import standing_usd_h
from spotlight_plan.scenarios.strategies import SpotPlaces, Strategy
from spotlight_plan.scenarios.strategy_scenario import on_demand_node

HORIZON_H = 24.0
PACES = 32
"""So many different numbers of nodes are told apart along a trace, if there are more."""


@dataclass(frozen=True, slots=True, eq=False)
class _Course:
    """A run along a trace, until its horizon: sums at the ends of stretches in which each is linear in time.

    Attributes:
        done: iterations, as all sums from 0.
        previews, coverage, gained: over iterations after the first.
    """

    done: Figures
    at_s: Figures
    usd: Figures
    previews: Figures
    coverage: Figures
    gained: Figures

    def after(self, iterations: float) -> _Run:
        """So many iterations; infinite time where nothing goes on."""
        sums = (self.at_s, self.usd, self.previews, self.coverage, self.gained)
        end = int(np.searchsorted(self.done, iterations))
        if end < len(self.done):
            before, after = self.done[end - 1], self.done[end]
            share = (iterations - before) / (after - before)
            return _Run(
                iterations, *(float(one[end - 1] + share * (one[end] - one[end - 1])) for one in sums)
            )
        # Beyond the hours that were looked at, as much goes on as in their mean.
        done = float(self.done[-1])
        longer = iterations / done if done else math.inf
        at_s, usd, *explored = (float(one[-1]) for one in sums)
        return _Run(done, at_s * longer, usd * longer, *explored)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is done after some iterations; see :class:`_Course`."""

    done: float
    at_s: float
    usd: float
    previews: float
    coverage: float
    gained: float


class ClosedForm:
    """Of one cluster and strategy; see the module's docstring.

    Args:
        prepared: its trace may end after :data:`HORIZON_H`.
        limit_h: hours after which a run is given up.
        starts: of which the first counts for what does not depend on one; () stands for ``prepared`` alone.
        notice_s: ahead of losses; None: as in the trace.

    Raises:
        ConfigError: as :func:`~spotlight_plan.scenarios.strategy_scenario.scenario_of`.
    """

    def __init__(
        self,
        prepared: Prepared,
        strategy: Strategy,
        limit_h: float,
        starts: Sequence[Prepared] = (),
        notice_s: float | None = None,
    ) -> None:
        self.starts, self._noticed_s = starts or (prepared,), notice_s
        self._presences: dict[int, tuple[Prepared, Presence]] = {}  # by the start's identity
        self._prepared, self._strategy, self._file = prepared, strategy, prepared.file.run_as(strategy)
        self._limit_h = limit_h
        self._iteration = IterationForm(prepared, strategy)
        self.pace = cache(self._pace)

    # -- a run -----------------------------------------------------------------------------------------

    def outcome(self, start: Prepared, seen: int | None = None) -> SimulationOutcome:
        """A run along the trace of one start: to its target, or of so many iterations."""
        wanted = self._file.target_of(self._strategy)
        course = self._course(start)
        run = course.after(seen or (wanted.iterations if wanted else self._file.run.iterations))
        explores = self._iteration.plan.exploration is not None
        later = max(run.done - 1, 1e-9)
        previews = run.previews / later if explores else math.nan
        explored = Explored(run.gained / run.coverage, run.coverage / later) if run.coverage else None
        target, why = self._target_of(previews, explored)
        iterations = seen or (target.iterations if target else self._file.run.iterations)
        run, first, limit_h = course.after(iterations), course.after(1), self._limit_h
        is_late = run.at_s > limit_h * 3600
        hours, usd = run.at_s / 3600, run.usd
        first_h, later_n = first.at_s / 3600, max(1, iterations - 1)
        return SimulationOutcome(
            strategy=self._strategy.name,
            problem=late(limit_h) if is_late else None,
            iterations=0 if is_late else iterations,
            iteration_s=math.nan if is_late else 3600 * (hours - first_h) / later_n,
            iteration_usd=math.nan if is_late else (usd - first.usd) / later_n,
            target=target,
            target_h=hours if target and not is_late else math.nan,
            target_usd=usd if target and not is_late else math.nan,
            simulated_h=min(hours, limit_h),
            simulated_usd=math.nan if is_late else usd,
            preview_share=previews,
            early_share=self._iteration.early,
            first_h=math.nan if is_late else first_h,
            first_usd=math.nan if is_late else first.usd,
            no_target=why,
            contrast=explored.contrast if explored else math.nan,
            coverage=explored.coverage if explored else math.nan,
        )

    def steady_s(self, nodes: int) -> float:
        """Seconds to the target if so many nodes worked all along, with what is trained again after losses.

        Infinite where nothing goes on. NaN where no target can be promised: iterations to it are then not
        comparable with those of others.
        """
        pace = self.pace(nodes)
        if math.isinf(pace.seconds):
            return math.inf
        target, _ = self._target_of(pace.previews, pace.explored)
        return pace.first_s + (target.iterations - 1) * pace.seconds if target else math.nan

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the first start's trace; see :attr:`Presence.numbers`."""
        return self._presence(self.starts[0]).numbers

    def _target_of(self, previews: float, explored: Explored | None) -> tuple[Target | None, str]:
        """Iterations to the target, or why it cannot be promised."""
        stated, random = self._file.stated_target(self._strategy), self._file.random_target
        if stated is None and self._iteration.plan.exploration is not None:
            return learned_target(random, previews, explored, self._file.contrast_exponent)
        early = 0.0 if self._strategy.name in self._file.iterations_to_target else self._iteration.early
        return honest_target(stated, random, previews, early)

    def _course(self, start: Prepared) -> _Course:
        there = self._presence(start)
        paces, which = self._paces(there.working)

        def of(figure: Callable[[IterationPace], float]) -> Figures:
            return np.array([figure(pace) for pace in paces])[which]

        first_s, later_s = of(lambda pace: pace.first_s), of(lambda pace: pace.seconds)
        begun = np.cumsum((there.until_s - there.since_s) / first_s)
        cut = int(np.searchsorted(begun, 1.0))  # the stretch in which the first iteration ends
        ends = cut < len(begun)
        before, after = slice(cut + 1), slice(cut, None)

        def split(first: Figures, later: Figures) -> Figures:
            return np.concatenate([first[before], later[after]])

        until_s = there.until_s
        if ends:
            left = 1.0 - (begun[cut - 1] if cut else 0.0)
            until_s = np.insert(until_s, cut, there.since_s[cut] + left * first_s[cut])
        took_s = np.diff(until_s, prepend=0.0)
        more = took_s / split(first_s, later_s)
        later = more.copy()
        later[before] = 0.0

        def summed(each: Figures) -> Figures:
            return np.append(0.0, np.cumsum(each))

        def explored(figure: Callable[[IterationPace], float]) -> Figures:
            values = of(figure)
            return summed(later * split(values, values))

        crossing = of(lambda pace: pace.crossing_usd)
        usd_h = self._standing_usd_h + split(there.usd_h, there.usd_h)
        return _Course(
            summed(more),
            np.append(0.0, until_s),
            summed(took_s * usd_h / 3600 + more * split(crossing, crossing)),
            explored(lambda pace: pace.previews),
            explored(lambda pace: pace.explored.coverage if pace.explored else 0.0),
            explored(lambda pace: pace.explored.coverage * pace.explored.contrast if pace.explored else 0.0),
        )

    def _paces(self, nodes: Figures) -> tuple[list[IterationPace], NDArray[np.intp]]:
        """Paces, and which of them each number has; more numbers than :data:`PACES` share those of others."""
        least, width = self._iteration.learner_nodes, max(1, int(nodes.max()) // PACES)
        alike = np.where(nodes < least, 0, least + (nodes - least) // width * width + width // 2)
        numbers, which = np.unique(alike, return_inverse=True)
        return [self.pace(int(number)) for number in numbers], which

    @cached_property
    def _standing_usd_h(self) -> float:
        """Of all that is paid whether spot nodes are there or not."""
        cluster, pricing = self._file.cluster, self._prepared.pricing
        usd_h = sum(standing_usd_h(self._file, self._prepared.profile, self._strategy).values())
        if not self._strategy.is_all_spot:
            assert pricing.reserved is not None, "prepared for a strategy with reserved nodes"
            usd_h += cluster.reserved.nodes * cluster.reserved.gpus_per_node * pricing.reserved.usd_gpu_h
        if self._strategy.places.stays:
            assert pricing.on_demand is not None, "prepared for a strategy that rents on demand"
            usd_h += cluster.spot.nodes * cluster.spot.gpus_per_node * pricing.on_demand.usd_gpu_h
        return usd_h

    def _presence(self, start: Prepared) -> Presence:
        """A learner that takes a node on demand has its own place again after a while."""
        of, known = self._presences.get(id(start), (None, None))
        if known is None or of is not start:
            known = self._presence_of(start)
            self._presences[id(start)] = start, known
        return known

    def _presence_of(self, start: Prepared) -> Presence:
        until_s = min(HORIZON_H, self._limit_h) * 3600
        if self._strategy.places is not SpotPlaces.SPOT:
            return steady(self._file.cluster.spot.nodes if self._strategy.places.stays else 0, until_s)
        found = start.presence(self._strategy, self._joins_s, until_s)
        if self._strategy.placement != "spot_then_on_demand":
            return found
        after_s = self._file.learner.on_demand.after_s + self._joins_s
        return found.with_learner(self._iteration.learner_nodes, after_s, on_demand_node(start).price_usd_h)

    @cached_property
    def _joins_s(self) -> float:
        """From a node's arrival until it rolls out."""
        return self._iteration.boot_s + self._iteration.starts_s

    def _pace(self, nodes: int) -> IterationPace:
        losses_s = self._losses_s if self._strategy.learner_moves else 0.0
        return self._iteration.pace(nodes, losses_s, self._notice_s if losses_s else 0.0)

    @cached_property
    def _losses_s(self) -> float:
        """How often a second a learner on spot nodes loses one, over all starts."""
        each = [self._presence(start).losses_s(self._iteration.learner_nodes) for start in self.starts]
        return sum(each) / len(each)

    @property
    def _notice_s(self) -> float:
        known_s = self._noticed_s
        return self._presence(self.starts[0]).notice_s if known_s is None else known_s


def late(limit_h: float) -> str:
    """What is said of a run that does not end in time."""
    return f"not done after {limit_h:g} h, when run.until_h was over"
