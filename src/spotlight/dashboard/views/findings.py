"""What is wrong with a run, or looks so, each with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spotlight.scheduler.types import Phase
from spotlight.store.ledger.history import History

SILENT_SHARE_MAX = 0.5
LOST_SHARE_MAX = 0.05
IDLE_SHARE_MAX = 0.4
DROPPED_SHARE_MAX = 0.05
UNSEEN_S_MAX = 300.0
_ENDED = {"failed": "failed", "killed": "was killed"}
_WORKED_S_MIN = 600.0
"""Shares of less work say little."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One finding; ``serious`` if the run does not go on, or learns little."""

    finding: str
    remedy: str
    serious: bool = False


def findings(
    history: History, seconds: Mapping[Phase, float], row: Mapping[str, float | None], now_s: float
) -> list[RunFinding]:
    """The findings, serious ones first.

    Args:
        seconds: worker-seconds by phase.
        row: the newest metrics.
        now_s: since the epoch.
    """
    found = [
        *_about_attempts(history, now_s),
        *_about_seconds(seconds),
        *_about_samples(history),
        *_about_notices(history),
        *_about_learning(row),
    ]
    return sorted(found, key=lambda each: not each.serious)


def _about_attempts(history: History, now_s: float) -> Iterator[RunFinding]:
    if not history.attempts:
        return
    last = history.attempts[-1]
    log = f"attempts/{last.number:03d}.log"
    if history.state in _ENDED:
        yield RunFinding(
            f"Attempt {last.number} on {last.host} {_ENDED[history.state]}.",
            f"Read {log}; the same `spotlight train` command goes on from the last checkpoint.",
            serious=True,
        )
    elif history.state == "stopped":
        yield RunFinding("The run was stopped.", "The same `spotlight train` command goes on.")
    elif history.state == "running" and now_s - last.seen_at > UNSEEN_S_MAX:
        yield RunFinding(
            f"Attempt {last.number} has billed nothing for {(now_s - last.seen_at) / 60:.0f} minutes.",
            f"See whether process {last.pid} on {last.host} lives, and read {log}.",
            serious=True,
        )


def _about_seconds(seconds: Mapping[Phase, float]) -> Iterator[RunFinding]:
    total = sum(seconds.values())
    if total < _WORKED_S_MIN:
        return
    lost, idle = seconds.get(Phase.LOST, 0.0) / total, seconds.get(Phase.IDLE, 0.0) / total
    if lost > LOST_SHARE_MAX:
        yield RunFinding(
            f"{lost:.0%} of the worker-seconds were lost; expected at most {LOST_SHARE_MAX:.0%}.",
            "Make checkpoints more often (checkpoint.every); where nodes vanish without a notice, run "
            "`spotlight notices` on one.",
        )
    if idle > IDLE_SHARE_MAX:
        yield RunFinding(
            f"{idle:.0%} of the worker-seconds were idle; expected at most {IDLE_SHARE_MAX:.0%}.",
            "Overlap rollouts and training (pipeline.axis, pipeline.next_share), or explore seeds "
            "(exploration); `spotlight plan` says how many nodes pay.",
        )


def _about_samples(history: History) -> Iterator[RunFinding]:
    drops = {
        reason: number for reason, number in history.counts.train_dropped.items() if not reason.by_choice
    }
    dropped = sum(drops.values())
    ended = dropped + history.counts.trained
    if ended and dropped / ended > DROPPED_SHARE_MAX:
        reasons = ", ".join(f"{number} {reason.value}" for reason, number in drops.items())
        yield RunFinding(
            f"{dropped / ended:.0%} of the train samples were dropped ({reasons}).",
            "See the reasons under Log; rewards that fail or are late: `spotlight rewards check NAME`, "
            "rewards[].deadline_s.",
        )


def _about_notices(history: History) -> Iterator[RunFinding]:
    unnoticed = history.preemptions - history.noticed
    if unnoticed > history.noticed:
        yield RunFinding(
            f"{unnoticed} of {history.preemptions} spot nodes vanished without a notice.",
            "Run `spotlight notices` on a spot node; see fleet.notices.cloud.",
        )


def _about_learning(row: Mapping[str, float | None]) -> Iterator[RunFinding]:
    silent = row.get("advantage/silent_groups_share")
    if silent is not None and silent > SILENT_SHARE_MAX:
        yield RunFinding(
            f"In {silent:.0%} of the newest groups all rewards are equal: they teach nothing.",
            "Harder or easier prompts, a finer reward, or a larger rollout.group_size.",
            serious=True,
        )
    if row.get("train/loss", 0.0) is None:
        yield RunFinding("The newest loss is not a number.", "Lower learner.learning_rate.", serious=True)
