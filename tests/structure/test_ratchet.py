"""The code may only shrink: see ``ratchet.py``, which also updates ``figures.json``."""

from __future__ import annotations

import pytest
from tests.structure.ratchet import Figures, committed, complaints, measured, unexplained, updated, walked


def test_no_figure_of_the_code_has_grown() -> None:
    assert not list(complaints(measured(), committed()))


def test_every_figure_that_was_raised_says_why() -> None:
    assert not unexplained(committed())


@pytest.mark.parametrize("driver", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_rollout_passes_no_more_files(driver: str) -> None:
    passed = {name: value for name, value in walked(driver).items() if "passed" in name}
    assert passed
    assert not [one for one in complaints(passed, committed()) if "--why" in one]


def test_a_figure_that_grows_is_refused_without_a_reason() -> None:
    held: Figures = {"lines": [{"value": 100, "why": "the first measurement"}]}
    assert len(list(complaints({"lines": 101}, held))) == 1
    with pytest.raises(ValueError, match="--why"):
        updated({"lines": 101}, held, "")
    raised = updated({"lines": 101}, held, "a new family")
    assert not list(complaints({"lines": 101}, raised))
    assert [change["why"] for change in raised["lines"]] == ["the first measurement", "a new family"]
    assert unexplained({"lines": [*held["lines"], {"value": 101, "why": " "}]}) == ["lines"]


def test_a_figure_that_shrinks_is_held_where_it_is_then() -> None:
    held: Figures = {"lines": [{"value": 1000, "why": "the first measurement"}]}
    assert not list(complaints({"lines": 985}, held))
    assert list(complaints({"lines": 900}, held))
    assert updated({"lines": 900}, held, "")["lines"][-1]["value"] == 900
