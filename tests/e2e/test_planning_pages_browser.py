"""The pages of ``spotlight simulate`` and ``plan`` in a browser: the verdict first, no label over another.

Needs Chromium of the distribution (``apt install chromium``) and Playwright.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dashboard_page import CHROMIUM
from tests.unit.test_plan_explanation import planned
from tests.unit.test_strategy_runs import NOW, prepared

from spotlight_plan.candidates import prepared_for
from spotlight_plan.compare import run_tasks
from spotlight_plan.pages.comparison_page import comparison_page
from spotlight_plan.pages.plan_page import plan_page
from spotlight_plan.strategy_runs import grouped, tasks_from_starts

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium"),
]
STRATEGIES = ("reserved_only", "spot_rollout_only", "critical_path", "spotlight")
OVERLAPS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const boxes = [...plot.querySelectorAll('text')].filter(text => text.textContent.trim())
    .map(text => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width > 0)
  return boxes.flatMap(([name, a], i) => boxes.slice(i + 1).filter(([other, b]) => other !== name
    && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2).map(([other]) => [name, other]))
})"""
"""Texts of a figure that share pixels; hidden copies of a text are itself."""


def comparison() -> str:
    prep = prepared()
    compared = run_tasks(tasks_from_starts(prep, STRATEGIES, timelines=True), 1)
    starts = prep.file.run.starts
    return comparison_page(prep, grouped([one.outcome for one in compared], starts), compared[::starts], NOW)


def plan() -> str:
    file, found, explained = planned()
    assert found.answer is not None
    return plan_page(file, found, explained, prepared_for(file, found.answer.candidate, 2, NOW), NOW)


@pytest.mark.parametrize("page", [comparison, plan])
def test_the_verdict_comes_first_and_no_label_lies_over_another(
    browser: Browser, page: object, tmp_path: Path
) -> None:
    assert callable(page)
    path = tmp_path / "page.html"
    path.write_text(page(), encoding="utf-8")
    shown = browser.new_page(viewport={"width": 1240, "height": 900})
    shown.goto(path.as_uri())
    assert "reaches the target in" in shown.inner_text("h1 + p")
    shown.wait_for_function(
        "[...document.querySelectorAll('.js-plotly-plot')].every(plot => plot.querySelector('.main-svg'))"
    )
    assert shown.evaluate(OVERLAPS) == []
    shown.close()
