"""The production controller under faulty runs in virtual time, and what those runs are worth."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from tests.simulation import check
from tests.simulation.check import TrialOutcome, check_seeds, main, replay_command, run_trial, shrink
from tests.simulation.faults import FaultKind
from tests.simulation.mutations import FOUND_BY, MUTATIONS, Mutation, find
from tests.simulation.swarm import Trial, draw_trial

SEEDS = 300


@pytest.mark.parametrize("seeds", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_seed_violates_anything_and_every_branch_is_taken(
    seeds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_seeds(0, seeds, twice=False) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "seed",
    [
        2183,  # the nodes where a lost learner starts next were leased before its loss was reported
        4965,  # a trained sample was kept from a preview that was made again with other steps
        5340,  # what was committed of a rollout that older weights had begun was never freed
        5969,  # a larger learner took the last nodes, and what the smaller one waited for was never made
    ],
)
def test_seeds_that_failed_once_do_not_again(seed: int) -> None:
    assert run_trial(draw_trial(seed)).failure is None


@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_a_seed_fixes_everything(seed: int) -> None:
    first, second = run_trial(draw_trial(seed)), run_trial(draw_trial(seed))
    assert first == second
    assert first.log_hash != run_trial(draw_trial(seed + 1)).log_hash


NEVER_END = {"leases never expire", "unanswered commands are not repeated"}
"""Bugs that take seconds to be sure of."""


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(
            each, marks=pytest.mark.slow if each.bug in NEVER_END else (), id=each.bug.replace(" ", "-")
        )
        for each in MUTATIONS
    ],
)
def test_planted_bugs_are_found(mutation: Mutation) -> None:
    likely = [FOUND_BY[mutation.bug]] if mutation.bug in FOUND_BY else []
    assert find(mutation, [*likely, *range(SEEDS)]) is not None


def test_a_failing_seed_shrinks_to_a_line_that_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    bug = next(mutation for mutation in MUTATIONS if mutation.bug.startswith("a lost learner"))
    with bug.planted():
        found = find(bug, range(SEEDS))
        assert found is not None
        small = shrink(draw_trial(found[0]))
        assert run_trial(small).failure is not None
        kinds = {FaultKind.CRASH_LEARNER, FaultKind.KILL_NODE, FaultKind.REBOOT_NODE}
        assert len(small.faults) == 1
        assert small.faults[0].kind in kinds
        arguments = replay_command(small).split()[3:]
        assert main(arguments) == 1
        assert "after the last fault: learning" in capsys.readouterr().out
    assert main(arguments) == 0, "the bug is gone, and so is the failure"


def test_shrinking_keeps_the_kind_of_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = next(one for one in map(draw_trial, range(SEEDS)) if len(one.faults) >= 4)
    needed = set(trial.faults[1:3])

    def run(one: Trial) -> TrialOutcome:
        kind = "AssertionError (lost)" if needed <= set(one.faults) else "KeyError (elsewhere)"
        return TrialOutcome(f"{kind} at {len(one.faults)}", "", Counter(), 0, 0.0, kind)

    monkeypatch.setattr(check, "run_trial", run)
    small = shrink(trial)
    assert set(small.faults) == needed
    assert small.scenario.plan.iterations == 1
    monkeypatch.setattr(check, "run_trial", lambda one: TrialOutcome(None, "", Counter(), 0, 0.0))
    assert shrink(trial) == trial


def test_a_run_without_faults_is_the_same_with_and_without_the_checks() -> None:
    trial = dataclasses.replace(draw_trial(5), faults=())
    outcome = run_trial(trial)
    assert outcome.failure is None
    assert outcome.branches["node_lost"] == 0
