"""Why a plan's answer is what it is: the levers that lead to it, and the assumptions that move it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from spotlight_plan.explanation.levers import Lever, levers_of
from spotlight_plan.explanation.sensitivity import Sensitivity, sensitivity_of
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.search import EvaluatedCandidate


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """Of one answer."""

    levers: tuple[Lever, ...]
    sensitivity: Sensitivity


def explain(
    file: ScenarioFile,
    answer: EvaluatedCandidate,
    now: datetime,
    *,
    jobs: int = 1,
    progress: Callable[[str], None] = lambda strategy: None,
) -> PlanExplanation:
    """Simulate what explains the answer.

    Args:
        progress: called after each simulation.
    """
    levers = levers_of(file, answer, now, jobs=jobs, progress=progress)
    return PlanExplanation(levers, sensitivity_of(file, answer.candidate, now, jobs=jobs, progress=progress))
