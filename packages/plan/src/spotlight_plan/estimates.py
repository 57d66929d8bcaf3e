"""Candidates by the closed form, and why others have none: the first, quick part of a search."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from spotlight_plan.candidates import (
    Candidate,
    file_of,
    gpu_types_of,
    prepared_for,
    require_shares,
    shape_of,
    ways,
)
from spotlight_plan.closed_form import HORIZON_H, ClosedForm, late
from spotlight_plan.compare import PREVIEWS_WANTED, SimulationOutcome
from spotlight_plan.prices.quotes import PriceError, Quote
from spotlight_plan.scenarios.prepared_scenario import Prepared, at_starts
from spotlight_plan.scenarios.pricing import quotes_of
from spotlight_plan.scenarios.profile import Profile, load_profile
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_sections import GeneratedTrace
from spotlight_plan.scenarios.strategies import strategy_named
from spotlight_plan.strategy_runs import StrategyRuns, known_or_inf
from spotlight_rewards.base.errors import ConfigError

GAIN_MIN = 0.01
"""A pipeline part must shorten a run by this share."""
MARGIN = 0.05
"""With fewer nodes, whose leases divide more evenly, an iteration may be shorter by this share."""
TOO_FEW_PREVIEWS = (
    f"less than {PREVIEWS_WANTED:.0%} of the previews could be used: too little idle time for them"
)


@dataclass(slots=True)
class Estimates:
    """Candidates by the closed form, and why others have none.

    Attributes:
        quotes: of the scenario's price source.
        left_out: by reason, what is not considered, each once.
    """

    file: ScenarioFile
    now: datetime
    quotes: tuple[Quote, ...] = ()
    left_out: dict[str, dict[str, None]] = field(default_factory=dict)
    _profile: Profile = field(init=False, repr=False)
    _ways: dict[tuple[object, ...], dict[str, object]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        unread: dict[str, str] = {}
        self._profile = load_profile(self.file.workload.profile)
        self.quotes = quotes_of(self.file, gpu_types_of(self.file), self.now, unread)
        for cloud, why in unread.items():
            self.left_out.setdefault(f"its prices could not be read: {why.splitlines()[0]}", {})[cloud] = None

    def of(self, candidate: Candidate) -> StrategyRuns | str:
        """One candidate to its target from every start, or why it has none."""
        _, form = next(self._forms(candidate, [candidate]))
        return form if isinstance(form, str) else _runs_of(form)

    def worth_it(self, cluster: Candidate) -> Iterator[tuple[Candidate, StrategyRuns]]:
        """The ways to run a strategy on a cluster, without those that a simpler one equals.

        A way that is no quicker than a simpler one at its most, fewest and median number of nodes, and the
        fewest but none, is not followed along the trace, nor one that would not even do with the most.
        """
        kept: list[tuple[Candidate, StrategyRuns, list[float]]] = []
        tried = [
            replace(cluster, strategy=name, next_share=share, previews=arm)
            for name, share, arm in ways(self.file, cluster.strategy)
        ]
        for one, form in self._forms(cluster, tried):
            reason = form if isinstance(form, str) else _hopeless(form, self.file.run.until_h)
            if reason is not None:
                self.left_out.setdefault(reason, {})[shape_of(one)] = None
                continue
            assert isinstance(form, ClosedForm)  # a string is a reason
            parts = strategy_named(one.strategy).parts
            simpler = [
                (other.target_h.p50, seconds)
                for candidate, other, seconds in kept
                if strategy_named(candidate.strategy).parts < parts and candidate.previews == one.previews
            ]
            steady_s = [form.steady_s(nodes) for nodes in form.numbers]
            if any(all(map(operator.ge, steady_s, each_s)) for _, each_s in simpler):
                continue
            runs = _runs_of(form)
            if isinstance(runs, str):
                self.left_out.setdefault(runs, {})[shape_of(one)] = None
            elif not simpler or runs.target_h.p50 < (1 - GAIN_MIN) * min(known_or_inf(h) for h, _ in simpler):
                kept.append((one, runs, steady_s))
        yield from ((one, runs) for one, runs, _ in kept)

    def reasons(self) -> tuple[str, ...]:
        """Reasons for leaving candidates out, each with its first example."""
        return tuple(
            f"{next(iter(shapes))}{f' and {len(shapes) - 1} more' if len(shapes) > 1 else ''}: {reason}"
            for reason, shapes in self.left_out.items()
        )

    def _forms(
        self, cluster: Candidate, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, ClosedForm | str]]:
        """Candidates of one cluster; those that cannot be simulated with the reason."""
        try:
            starts = at_starts(self.prepared(cluster))
        except (ConfigError, PriceError) as error:
            yield cluster, str(error).splitlines()[-1].strip(" -")
            return
        for candidate in candidates:
            try:
                way = replace(starts[0], file=self._run_so(starts[0].file, candidate))
                require_shares(way.file, candidate)
                form = self.form(way, candidate, starts)
            except ConfigError as error:
                yield candidate, str(error).splitlines()[-1].strip(" -")
                continue
            yield candidate, form

    def form(self, prepared: Prepared, candidate: Candidate, starts: Sequence[Prepared]) -> ClosedForm:
        """Of a candidate, over all starts; those that are ranked have no notices of their own.

        Raises:
            ConfigError: as :class:`~spotlight_plan.closed_form.ClosedForm`.
        """
        trace, strategy = self.file.trace, strategy_named(candidate.strategy)
        notice_s = trace.notice_lead_s if isinstance(trace, GeneratedTrace) else None
        return ClosedForm(prepared, strategy, self.file.run.until_h, starts, notice_s)

    def _run_so(self, file: ScenarioFile, candidate: Candidate) -> ScenarioFile:
        """A cluster's scenario with the pipeline and the previews of a candidate.

        Raises:
            ConfigError: they contradict the workload, which is that of every cluster.
        """
        way = candidate.next_share, candidate.previews
        if way == (None, None):
            return file
        if way not in self._ways:
            changed = file_of(self.file, candidate, self.file.run.iterations)
            self._ways[way] = {"pipeline": changed.pipeline, "exploration": changed.exploration}
        return file.model_copy(update=self._ways[way])

    def prepared(self, cluster: Candidate) -> Prepared:
        """The scenario with a candidate's cluster, with as much of the trace as is looked at: no notices."""
        run = self.file.run.model_copy(update={"until_h": min(HORIZON_H, self.file.run.until_h)})
        trace = self.file.trace
        if isinstance(trace, GeneratedTrace):
            trace = trace.model_copy(update={"notice_lead_s": 0.0})
        short = self.file.model_copy(update={"run": run, "trace": trace})
        return prepared_for(short, cluster, run.iterations, self.now, self.quotes, self._profile)


def _runs_of(form: ClosedForm) -> StrategyRuns | str:
    """From every start, or why that says nothing about the target."""
    first = form.outcome(form.starts[0])
    return useless(first) or StrategyRuns((first, *map(form.outcome, form.starts[1:])))


def _hopeless(form: ClosedForm, limit_h: float) -> str | None:
    """Why a way says nothing about the target, even if the most nodes of its trace stayed; None: it may.

    Judged from the first start alone. The share of previews does not only grow with the nodes: with fewer
    where leases do not divide among them, workers wait longer, and make more.
    """
    if form.steady_s(form.numbers[0]) > (1 + MARGIN) * limit_h * 3600:
        return late(limit_h)
    shares = (form.pace(nodes).previews for nodes in form.numbers)
    return TOO_FEW_PREVIEWS if all(share < PREVIEWS_WANTED for share in shares) else None


def useless(outcome: SimulationOutcome) -> str | None:
    """Why an outcome says nothing about the target, or None.

    Without previews a strategy trains on random seeds, and its iterations to target do not apply.
    """
    if outcome.problem is not None:
        return outcome.problem
    if outcome.preview_share < PREVIEWS_WANTED:
        return TOO_FEW_PREVIEWS
    if outcome.no_target:
        return outcome.no_target
    if math.isnan(outcome.target_h):
        return "too few iterations were done"
    return None
