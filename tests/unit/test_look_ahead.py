"""How much trainers generate while they wait: as much as ends training soonest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.executed_lines import executed_lines

from spotlight.scheduler.policies.trainers.look_ahead import Others, RolloutBudget, Timeline, find_budget

SECONDS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0])
OTHERS = st.builds(Others, SECONDS, st.sampled_from([0.5, 1.0, 4.0]), st.booleans())
TIMELINES = st.builds(
    Timeline, ready=st.integers(0, 3), waiting=st.integers(0, 12), others=st.none() | OTHERS,
    generate_s=SECONDS, train_s=SECONDS, enter_s=SECONDS, leave_s=SECONDS, generating=st.booleans(),
    coming=st.lists(SECONDS, max_size=3).map(tuple), whole=st.booleans(),
)  # fmt: skip


@given(TIMELINES, st.floats(0, 20))
def test_taking_never_ends_later_than_taking_nothing_and_gains_what_it_must(
    timeline: Timeline, gain_min_s: float
) -> None:
    budget = find_budget(timeline, gain_min_s=gain_min_s)
    assert 0 <= budget.units <= timeline.waiting
    if budget.units:
        assert budget.finish_without_s - budget.finish_s > gain_min_s
    else:
        assert budget.finish_s == budget.finish_without_s


@given(TIMELINES)
def test_of_equal_ends_the_one_that_takes_less_wins(timeline: Timeline) -> None:
    budget = find_budget(timeline)
    ends = [timeline.finish_s(taken) for taken in range(timeline.waiting + 1)]
    assert budget.finish_s == pytest.approx(min(ends))
    assert all(end > budget.finish_s for end in ends[: budget.units])
    for taken in range(len(ends)):
        assert timeline.at_least_s(taken) <= min(ends[taken:]) * (1 + 1e-9)


def test_parts_are_trained_as_they_arrive_and_a_whole_batch_at_once() -> None:
    parts = Timeline(1, 2, Others(4.0, 10.0), 5.0, 2.0, enter_s=1.0, leave_s=1.0, coming=(3.0,))
    # Ready at 0, 3, 4, 14 and 24 s; then with one of them taken, trainers are back at 7 s.
    assert parts.finish_s(0) == 26.0
    assert parts.finish_s(1) == 17.0
    whole = replace(parts, whole=True)
    assert whole.finish_s(0) == 34.0
    assert whole.finish_s(1) == 14.0 + 1.0 + 10.0


def test_idle_trainers_help_slow_generators() -> None:
    budget = find_budget(Timeline(0, 6, Others(10.0, 10.0), 4.0, 1.0, enter_s=1.0, leave_s=1.0))
    assert budget.finish_without_s == 71.0
    assert budget.finish_s < 0.5 * budget.finish_without_s
    assert budget.units >= 3


def test_nothing_is_taken_that_others_make_sooner() -> None:
    budget = find_budget(Timeline(0, 4, Others(1.0, 0.5), 6.0, 2.0, enter_s=2.0, leave_s=2.0))
    assert budget == RolloutBudget(0, budget.finish_without_s, budget.finish_without_s)


def test_without_others_trainers_make_everything() -> None:
    timeline = Timeline(0, 3, None, generate_s=2.0, train_s=1.0, enter_s=1.0, leave_s=1.0)
    assert find_budget(timeline) == RolloutBudget(3, 11.0, math.inf)


def test_nothing_to_do_takes_nothing() -> None:
    idle = Timeline(0, 0, Others(0.0, 1.0, busy=False), 1.0, 1.0, 0.0, 0.0)
    assert find_budget(idle) == RolloutBudget(0, 0.0, 0.0)


def test_a_large_timeline_is_searched_fast() -> None:
    timeline = Timeline(0, 64, Others(5.0, 1.0), 4.0, 0.2, 1.0, 1.0)
    assert executed_lines(lambda: find_budget(timeline)) < 40_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ready": -1}, "-1 units ready and 1 waiting; expected none below 0"),
        ({"train_s": -1.0}, "train_s is -1.0; expected seconds >= 0"),
        ({"generate_s": math.inf}, "generate_s is inf"),
    ],
)
def test_impossible_timelines_are_errors(change: dict[str, float], message: str) -> None:
    timeline = Timeline(0, 1, None, 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=message):
        replace(timeline, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit_s > 0, in seconds"):
        Others(0.0, 0.0)
