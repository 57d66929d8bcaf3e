"""``spotlight plan`` says how far it is, in a pipe too, and what it would answer now."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from itertools import count

import pytest
from rich.console import Console
from test_planned_parts import few_clusters

from spotlight_plan.commands import plan_progress
from spotlight_plan.commands.plan_progress import EVERY_S, FIRST_S, PlanProgress
from spotlight_plan.search import Goal, SearchStep, search


def test_a_search_tells_every_step_and_names_the_best_so_far() -> None:
    steps: list[SearchStep] = []
    file = few_clusters("plan.parts=[]")
    found = search(file, Goal(deadline_h=1000), datetime(2026, 11, 21, tzinfo=UTC), progress=steps.append)
    ranked, simulated = ([one for one in steps if one.what == what] for what in ("ranked", "simulated"))
    assert [one.done for one in ranked] == list(range(ranked[0].of + 1))
    assert [one.done for one in simulated] == list(range(simulated[0].of + 1))
    assert simulated[0].of == len(found.confirmed) * file.run.starts
    best = min(found.evaluated, key=lambda one: found.goal.rank(one.runs))
    assert (ranked[0].best, simulated[0].best) == (None, best)
    ticks, out = count(0, 2.0), io.StringIO()
    with PlanProgress(Console(file=out, width=1000), clock=lambda: float(next(ticks))) as shown:
        for done in range(9):
            shown.step(SearchStep("ranked", done, 9, best))
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + int((8 * 2.0 - FIRST_S) // EVERY_S)
    assert lines[0].startswith("2 of 9 clusters ranked; best so far, estimated: ")
    assert lines[0].endswith("about 14 s left")


def test_names_of_machines_are_no_markup() -> None:
    terminal = Console(file=io.StringIO(), width=1000, force_terminal=True, markup=False)
    step = SearchStep("ranked", 1, 2, None)
    with PlanProgress(terminal) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_progress, "said", lambda _: "a[/b] in [c]")
        shown.step(step)
    assert isinstance(terminal.file, io.StringIO)
    assert "a[/b] in [c]" in terminal.file.getvalue()
