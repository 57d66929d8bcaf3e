"""Why a plan's answer is what it is: the levers that lead to it, and the assumptions that move it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spotlight_plan.estimates import Estimates
from spotlight_plan.explanation.levers import Lever, levers_of
from spotlight_plan.explanation.sensitivity import Sensitivity, sensitivity_of
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.search import EvaluatedCandidate


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """Of one answer."""

    levers: tuple[Lever, ...]
    sensitivity: Sensitivity


def explain(file: ScenarioFile, answer: EvaluatedCandidate, now: datetime) -> PlanExplanation:
    """What leads to an answer, and what moves it."""
    estimates = Estimates(file, now)
    return PlanExplanation(levers_of(estimates, answer), sensitivity_of(estimates, answer.candidate))
