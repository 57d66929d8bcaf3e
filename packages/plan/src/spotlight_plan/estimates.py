"""Estimates of candidates, and the short simulations that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from spotlight_plan.candidates import Candidate, file_of, gpu_types_of, prepared_for, shape_of
from spotlight_plan.compare import SimulationTask, run_tasks
from spotlight_plan.prices.quotes import PriceError, Quote
from spotlight_plan.scenarios.prepare import Prepared, at_starts, priced_again
from spotlight_plan.scenarios.pricing import quotes_of
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.strategies import where_nodes_stay
from spotlight_plan.strategy_runs import StrategyRuns
from spotlight_plan.surrogate import (
    SteadyCurve,
    SteadyPoint,
    counts_wanted,
    estimated,
    point_of,
    steady_task,
)
from spotlight_rewards.base.errors import ConfigError

_NO_ROOM = "plan.candidates_max is reached"


@dataclass(slots=True)
class Estimates:
    """Candidates tried so far, with what was simulated for them.

    Attributes:
        progress: called after each simulation.
        quotes: of the scenario's price source.
        tried: all that were tried, useless or not.
        lengths_s: of the iterations after the first, with all spot nodes.
        points: short simulations by :func:`family_of` and number of spot nodes.
        left_out: by reason, what is not considered, each once.
        limit: short simulations up to which may be made now.
    """

    file: ScenarioFile
    now: datetime
    jobs: int
    progress: Callable[[str], None]
    quotes: tuple[Quote, ...] = ()
    tried: set[Candidate] = field(default_factory=set)
    lengths_s: dict[Candidate, tuple[float, ...]] = field(default_factory=dict)
    points: dict[Candidate, dict[int, SteadyPoint]] = field(default_factory=dict)
    left_out: dict[str, dict[str, None]] = field(default_factory=dict)
    limit: int = 0
    _starts: dict[Candidate, tuple[Prepared, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limit = self.file.plan.candidates_max
        unread: dict[str, str] = {}
        self.quotes = quotes_of(self.file, gpu_types_of(self.file), self.now, unread)
        for cloud, why in unread.items():
            self.left_out.setdefault(f"its prices could not be read: {why.splitlines()[0]}", {})[cloud] = None

    @property
    def simulated(self) -> int:
        """Short simulations so far."""
        return sum(map(len, self.points.values()))

    def of(self, candidates: Sequence[Candidate]) -> dict[Candidate, StrategyRuns]:
        """Estimate those that are new and feasible; what they need is simulated, up to the limit."""
        starts: dict[Candidate, tuple[Prepared, ...]] = {}
        tasks: dict[tuple[Candidate, int], tuple[Prepared, SimulationTask | None]] = {}
        for candidate in dict.fromkeys(candidates):
            if candidate in self.tried or (prepared := self._prepared(candidate)) is None:
                continue
            family = family_of(candidate)
            known = self.points.get(family, {})
            counts = counts_wanted(prepared, candidate.strategy)
            new = [one for one in counts if one not in known and (family, one) not in tasks]
            if self.simulated + len(tasks) + len(new) > self.limit:
                self.leave_out(candidate, _NO_ROOM)
                continue
            self.tried.add(candidate)
            self.left_out.get(_NO_ROOM, {}).pop(shape_of(candidate), None)  # there is room by now
            starts[candidate] = prepared
            for one in new:
                tasks[family, one] = prepared[0], steady_task(prepared[0], family.strategy, one)
        self._simulate(tasks)
        return {candidate: self._estimate(candidate, prepared) for candidate, prepared in starts.items()}

    def leave_out(self, candidate: Candidate, reason: str) -> None:
        """Remember why a candidate is not considered."""
        self.left_out.setdefault(reason, {})[shape_of(candidate)] = None

    def reasons(self) -> tuple[str, ...]:
        """Reasons for leaving candidates out, each with its first example."""
        return tuple(
            f"{next(iter(shapes))}{f' and {len(shapes) - 1} more' if len(shapes) > 1 else ''}: {reason}"
            for reason, shapes in self.left_out.items()
            if shapes
        )

    def _prepared(self, candidate: Candidate) -> tuple[Prepared, ...] | None:
        """The candidate from every start; where only the place differs from another, only prices are new."""
        layout, iterations = _layout(candidate), self.file.plan.iterations
        try:
            if layout in self._starts:
                changed = file_of(self.file, candidate, iterations)
                return priced_again(self._starts[layout], changed, candidate.strategy, self.now, self.quotes)
            prepared = prepared_for(self.file, candidate, iterations, self.now, self.quotes)
        except (ConfigError, PriceError) as error:
            self.tried.add(candidate)
            self.leave_out(candidate, str(error).splitlines()[-1].strip(" -"))
            return None
        self._starts[layout] = at_starts(prepared)
        return self._starts[layout]

    def _simulate(
        self, tasks: Mapping[tuple[Candidate, int], tuple[Prepared, SimulationTask | None]]
    ) -> None:
        real = {key: task for key, (_, task) in tasks.items() if task is not None}
        results = run_tasks(list(real.values()), self.jobs, lambda task: self.progress(task.strategy))
        found = dict(zip(real, results, strict=True))
        for (family, nodes), (prepared, _) in tasks.items():
            point = point_of(prepared, family.strategy, nodes, found.get((family, nodes)))
            self.points.setdefault(family, {})[nodes] = point

    def _estimate(self, candidate: Candidate, prepared: Sequence[Prepared]) -> StrategyRuns:
        points = self.points[family_of(candidate)]
        most = max(counts_wanted(prepared, candidate.strategy))
        self.lengths_s[candidate] = points[most].lengths_s
        # Points with more nodes are other candidates', and explore more.
        curve = SteadyCurve.of(point for nodes, point in points.items() if nodes <= most)
        return StrategyRuns(tuple(estimated(one, candidate.strategy, curve) for one in prepared))


def family_of(candidate: Candidate) -> Candidate:
    """What shares a curve: all but the number of spot nodes, the places (unless apart), and whether nodes are
    taken on demand.
    """
    return replace(_layout(candidate), spot_nodes=0, strategy=where_nodes_stay(candidate.strategy))


def _layout(candidate: Candidate) -> Candidate:
    """What takes the same time: all but the places; the spot machine's tells whether they are apart."""
    fixed = replace(candidate.reserved, cloud="", region="", name="")
    between = "away" if candidate.crossing else ""
    return replace(candidate, reserved=fixed, spot=replace(candidate.spot, cloud=between, region="", name=""))
