"""The ledger refuses every history in which a sample is lost, counted twice or used before it is scored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.scheduler.ledger import AccountingError, Ledger
from spotlight.scheduler.records import CommitRejected, PromptSeen, RolloutIssued, StepApplied
from spotlight.scheduler.types import (
    DropReason,
    Maker,
    Phase,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight_rewards.base.prompts import Prompt, PromptId

PROMPT = Prompt(PromptId("p"), "a red circle", {"tag": "colors"})
VERSION = PolicyVersion(1)


def make_rollout(number: int = 0, purpose: Purpose = Purpose.TRAIN) -> Rollout:
    return Rollout(RolloutId(f"r{number}"), purpose, 0, PROMPT.id, number, number, 4, PolicyVersion(0))


def issue(ledger: Ledger, rollout: Rollout) -> None:
    ledger.issue(rollout, PROMPT)


def finish(ledger: Ledger, rollout: Rollout) -> None:
    ledger.finish(rollout, Maker(WorkerId("w"), 1))


def score(ledger: Ledger, rollout: Rollout) -> None:
    ledger.score(rollout.id, {"reward": 0.5})


def use(ledger: Ledger, rollout: Rollout) -> None:
    if rollout.purpose is Purpose.TRAIN:
        ledger.train(rollout.id, VERSION)
    else:
        ledger.evaluate(rollout.id)


def drop(ledger: Ledger, rollout: Rollout) -> None:
    ledger.drop(rollout.id, DropReason.REWARD_ERROR, "the reward raised")


FACTS: dict[str, Callable[[Ledger, Rollout], None]] = {
    "issue": issue,
    "finish": finish,
    "score": score,
    "use": use,
    "drop": drop,
}
LIVES = [
    [*prefix, *end]
    for prefix in ([], ["issue"], ["issue", "finish"], ["issue", "finish", "score"])
    for end in ([], ["drop"], ["use"])
    if prefix or not end
    if end != ["use"] or "score" in prefix
]
"""Every life a rollout may have had so far."""


@given(st.lists(st.sampled_from(sorted(FACTS)), max_size=6), st.sampled_from([Purpose.TRAIN, Purpose.EVAL]))
def test_only_the_one_order_of_facts_is_accepted(facts: list[str], purpose: Purpose) -> None:
    ledger, rollout = Ledger(), make_rollout(purpose=purpose)
    done: list[str] = []
    for fact in facts:
        legal = [*done, fact] in LIVES or (done[-1:] in (["use"], ["drop"]) and fact == "issue")
        if not legal:
            with pytest.raises(AccountingError, match="r0"):
                FACTS[fact](ledger, rollout)
            return  # the state after a refused fact is not defined: the run stops
        FACTS[fact](ledger, rollout)
        # Ids are unique to a run by their names; the ledger itself only watches those in flight.
        done = ["issue"] if fact == "issue" else [*done, fact]
        ledger.check()
        assert ledger.in_flight == (done[-1] not in ("use", "drop"))


def test_samples_are_used_for_what_they_were_made_for() -> None:
    ledger = Ledger()
    training, evaluation = make_rollout(0), make_rollout(1, Purpose.EVAL)
    for rollout in (training, evaluation):
        issue(ledger, rollout)
        finish(ledger, rollout)
        score(ledger, rollout)
    with pytest.raises(AccountingError, match="r0 for train"):
        ledger.evaluate(training.id)
    with pytest.raises(AccountingError, match="r1 for eval"):
        ledger.train(evaluation.id, VERSION)


@given(st.lists(st.sampled_from(LIVES), max_size=12))
def test_counts_add_up_and_positions_have_no_gaps(lives: list[list[str]]) -> None:
    ledger = Ledger()
    for number, life in enumerate(lives):
        rollout = make_rollout(number, Purpose.EVAL if number % 3 == 0 else Purpose.TRAIN)
        for fact in life:
            FACTS[fact](ledger, rollout)
            ledger.check()
    ended = sum(life[-1:] in (["use"], ["drop"]) for life in lives)
    assert ledger.issued.total() == sum(bool(life) for life in lives)
    assert ledger.in_flight == ledger.issued.total() - ended
    records = ledger.take_records()
    assert [position for position, _ in records] == list(range(1, len(records) + 1))
    assert sum(isinstance(record, PromptSeen) for _, record in records) == (ledger.issued.total() > 0)
    assert ledger.take_records() == []


def test_a_rejected_commit_of_an_unknown_rollout_names_none() -> None:
    ledger = Ledger()
    issue(ledger, make_rollout())
    ledger.reject(RolloutId("r0"), "stale_epoch")
    ledger.reject(RolloutId("never issued"), "unknown")
    records = [record for _, record in ledger.take_records()]
    assert records[2:] == [CommitRejected(RolloutId("r0"), "stale_epoch"), CommitRejected(None, "unknown")]
    assert ledger.rejected == {"stale_epoch": 1, "unknown": 1}


def test_a_snapshot_goes_through_json_and_continues() -> None:
    ledger = Ledger()
    for number, life in enumerate([["issue", "drop"], ["issue", "finish", "score", "use"]]):
        for fact in life:
            FACTS[fact](ledger, make_rollout(number))
    ledger.step(StepApplied(VERSION, 0, 0, 1, 0.5, 1.0))
    ledger.publish(VERSION)
    ledger.take_records()
    restored = Ledger.restore(json.loads(json.dumps(ledger.snapshot())))
    assert restored.snapshot() == ledger.snapshot()
    restored.check()
    for continued in (ledger, restored):
        issue(continued, make_rollout(2))
    assert restored.take_records() == ledger.take_records()


def test_no_snapshot_while_rollouts_are_in_flight() -> None:
    ledger = Ledger()
    issue(ledger, make_rollout())
    with pytest.raises(AccountingError, match="in flight"):
        ledger.snapshot()


@pytest.mark.parametrize("broken", [{"position": "x"}, {"issued": 3}, {"prompts": "p"}])
def test_a_damaged_snapshot_names_its_key(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"ledger.{next(iter(broken))}"):
        Ledger.restore({**Ledger().snapshot(), **broken})
    with pytest.raises(ValueError, match=r"ledger\.issued\.train: .*integer"):
        Ledger.restore({**Ledger().snapshot(), "issued": {"train": "seven"}})


@given(st.lists(st.tuples(st.sampled_from(list(Phase)), st.floats(0, 1e6)), max_size=30))
def test_billed_seconds_are_the_sum_over_phases(spent: list[tuple[Phase, float]]) -> None:
    ledger = Ledger()
    for phase, seconds in spent:
        ledger.spend(phase, seconds)
        ledger.check()
    assert math.isclose(ledger.billed_s, sum(seconds for _, seconds in spent), abs_tol=1e-6)


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_time_does_not_run_backwards(seconds: float) -> None:
    with pytest.raises(AccountingError, match="seconds spent"):
        Ledger().spend(Phase.IDLE, seconds)


@pytest.mark.parametrize("counter", ["issued", "trained", "dropped", "dropped_purpose", "billed_s"])
def test_check_notices_every_count_that_is_off(counter: str) -> None:
    ledger = Ledger()
    issue(ledger, make_rollout())
    if counter in ("issued", "dropped_purpose"):
        getattr(ledger, counter)[Purpose.TRAIN] += 1
    elif counter == "dropped":
        ledger.dropped[DropReason.STALE] += 1
    else:
        setattr(ledger, counter, getattr(ledger, counter) + 1)
    with pytest.raises(AccountingError):
        ledger.check()


def test_a_prompt_is_written_before_its_first_rollout_only() -> None:
    ledger = Ledger()
    for number in range(3):
        issue(ledger, make_rollout(number))
    kinds = [type(record) for _, record in ledger.take_records()]
    assert kinds == [PromptSeen, RolloutIssued, RolloutIssued, RolloutIssued]
