"""What the closing screen says of a run's misfortunes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from spotlight.report.final_screen import prices, survived
from spotlight.report.record import RunRecord
from spotlight.store.ledger.ledger_schema import Incident

LOST = Incident.NODE_LOST


def record(**befell: object) -> RunRecord:
    calm = {
        "preemptions": 0, "noticed": 0, "incidents": {}, "interruptions": 0, "attempts": (1,), "undone": 0,
        "lost_s": 12.34, "prices_usd_h": (),
    }  # fmt: skip
    config = SimpleNamespace(fleet=SimpleNamespace(price_usd_h=0.05))
    return cast(RunRecord, SimpleNamespace(history=SimpleNamespace(**{**calm, **befell}), config=config))


@pytest.mark.parametrize(
    ("befell", "text"),
    [
        ({}, ""),
        ({"undone": 5, "incidents": {(Incident.NODE_JOINED, True): 4, (LOST, True): 2}}, ""),
        ({"preemptions": 1}, "Survived 1 preemption (0 with notice): 12.3 s of work lost"),
        ({"preemptions": 9, "noticed": 7}, "Survived 9 preemptions (7 with notice): 12.3 s of work lost"),
        (
            {"incidents": {(Incident.WORKER_CRASHED, True): 1, (Incident.WORKER_CRASHED, False): 1}},
            "Survived 2 worker crashes: 12.3 s of work lost",
        ),
        (
            {"incidents": {(Incident.WORKER_CRASHED, False): 1, (LOST, False): 1}},
            "Survived 1 worker crash, 1 reserved node lost: 12.3 s of work lost",
        ),
        (
            {"incidents": {(Incident.LEARNER_LOST, False): 2}, "undone": 30},
            "Survived 2 losses of the learner: 12.3 s of work lost, 30 ledger records done again",
        ),
        (
            {"preemptions": 2, "noticed": 1, "interruptions": 1, "attempts": (1, 2), "undone": 1},
            "Survived 2 preemptions (1 with notice), 1 interruption in 2 attempts: 12.3 s of work lost, "
            "1 ledger record done again",
        ),
    ],
)
def test_survived(befell: dict[str, object], text: str) -> None:
    assert survived(record(**befell)) == text


def test_prices_are_one_or_a_range() -> None:
    assert prices(record()) == "$0.05"
    assert prices(record(prices_usd_h=(0.015,))) == "$0.015"
    assert prices(record(prices_usd_h=(0.015, 0.02, 0.05))) == "$0.015 to $0.05"
