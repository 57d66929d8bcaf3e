"""The stages of an iteration: the table, the one place where it is followed, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import draw_stages
from scripts.marked_part import read_part

from spotlight.scheduler.stages import (
    TRANSITIONS,
    IllegalTransitionError,
    Stage,
    StageMachine,
    Trigger,
)

ROOT = Path(__file__).parents[2]


def test_every_stage_is_in_the_table_and_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(Stage)
    reached = {Stage.IDLE}
    while found := {to for stage in reached for to in TRANSITIONS[stage].values()} - reached:
        reached |= found
    assert reached == set(Stage)
    assert {trigger for ways in TRANSITIONS.values() for trigger in ways} == set(Trigger)
    assert [stage for stage, ways in TRANSITIONS.items() if not ways] == [Stage.OVER]


def test_an_iteration_with_a_checkpoint_goes_through_the_stages_in_order() -> None:
    machine, seen = StageMachine(), []
    for trigger in (
        Trigger.RUN_STARTED,
        Trigger.ROLLOUTS_HELD_BACK,
        Trigger.GROUPS_DECIDED,
        Trigger.EVALUATION_SCORED,
        Trigger.EVALUATION_REPORTED,
        Trigger.BATCH_FINISHED,
        Trigger.CHECKPOINT_DUE,
        Trigger.CHECKPOINT_COMMITTED,
    ):
        machine.move(trigger)
        seen.append(machine.stage.value)
    assert seen == [
        "starting",
        "preparing",
        "rolling",
        "reporting",
        "learning",
        "publishing",
        "committing",
        "starting",
    ]


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("trigger", Trigger)
def test_what_is_not_in_the_table_raises_and_names_stage_and_trigger(stage: Stage, trigger: Trigger) -> None:
    machine = StageMachine(stage)
    if trigger in TRANSITIONS[stage]:
        machine.move(trigger)
        assert machine.stage is TRANSITIONS[stage][trigger]
        return
    with pytest.raises(IllegalTransitionError, match=f"{trigger.value}.* in stage '{stage.value}'"):
        machine.move(trigger)
    assert machine.stage is stage


def test_nothing_else_changes_the_stage() -> None:
    scheduler = ROOT / "src" / "spotlight" / "scheduler"
    setters = [path.name for path in scheduler.rglob("*.py") if ".stage = " in path.read_text()]
    assert setters == ["stages.py"]


def test_the_diagram_of_the_documentation_is_the_table() -> None:
    shown = read_part(draw_stages.PAGE, draw_stages.MARK)
    assert shown == draw_stages.draw(), "run python -m scripts.draw_stages"
