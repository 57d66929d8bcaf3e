"""What is wrong with a run, or looks so, each with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spotlight.scheduler.types import Phase, Purpose
from spotlight.store.ledger.history import History
from spotlight.store.metrics import WALL_S
from spotlight_dashboard.metric_names import (
    CLIPPED_SHARE,
    GRADIENT,
    LOSS,
    REWARD,
    ROLLOUT_MFU,
    SILENT_GROUPS_SHARE,
    TRAIN_MFU,
)
from spotlight_dashboard.views.trends import (
    CLEAR,
    TREND_OF,
    Validated,
    falling_rewards,
    is_worse_than_best,
    trend,
)

SILENT_SHARE_MAX = 0.5
LOST_SHARE_MAX = 0.05
IDLE_SHARE_MAX = 0.4
DROPPED_SHARE_MAX = 0.05
UNSEEN_S_MAX = 300.0
UNSEEN_AT_FIRST_S_MAX = 3600.0
"""While it is not known how long an iteration takes."""
COLLAPSED_SHARE = 0.5
CLIPPED_SHARE_MAX = 0.5
MFU_MIN = 0.3
"""A busy H200 reaches .47 to .54, with diffusers' operators .36; one that waits for Python .24."""
_MEAN_OF = 5
_LINES_SHOWN = 5
ENDINGS = ("ended", "stopped")
"""Names of the findings that tell how a run ended."""
_ENDED = {"failed": "failed", "killed": "was killed"}
_WORKED_S_MIN = 600.0
_SAMPLES_MIN = 100
"""Shares of less work say little."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One finding; ``serious`` if the run does not go on, or learns little. ``name`` says which it is."""

    name: str
    finding: str
    remedy: str
    serious: bool = False


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a run may take; None: anything.

    Attributes:
        deadline_h: of work.
        no_spot_min: it may be without spot nodes that it had, or waits for, in a row.
    """

    budget_usd: float | None = None
    deadline_h: float | None = None
    no_spot_min: float = 15.0

    @property
    def look_ahead(self) -> bool:
        """Whether they need an outlook."""
        return self.budget_usd is not None or self.deadline_h is not None


@dataclass(frozen=True, slots=True)
class RunOutlook:
    """What a run has taken, and is expected to have taken at its end; None: not known."""

    usd: float | None = None
    hours: float | None = None


def findings(
    history: History,
    seconds: Mapping[Phase, float],
    rows: Sequence[Mapping[str, float | None]],
    now_s: float,
    spot_gone_at: float | None = None,
    outlook: RunOutlook = RunOutlook(),
    limits: RunLimits = RunLimits(),
    validations: Sequence[Validated] = (),
    damaged: Sequence[int] = (),
) -> list[RunFinding]:
    """The findings, serious ones first.

    Args:
        seconds: worker-seconds by phase.
        rows: the newest metrics, the oldest first.
        now_s: since the epoch.
        validations: the oldest first.
        damaged: numbers of the lines of ``metrics.jsonl`` that are no rows.
        spot_gone_at: since when a running run has no spot node of those that it had.
    """
    found = [
        *_about_attempts(history, now_s, iteration_s(rows)),
        *_about_damage(damaged),
        *_about_seconds(seconds),
        *_about_samples(history),
        *_about_notices(history),
        *_about_spot(spot_gone_at, now_s, limits),
        *_about_gpus(rows),
        *_about_learning(rows),
        *_about_rewards(_known(rows, REWARD)),
        *_about_trends(rows),
        *_about_held_out(validations),
        *_about_limits(outlook, limits),
    ]
    return sorted(found, key=lambda each: not each.serious)


def iteration_s(rows: Sequence[Mapping[str, float | None]]) -> float | None:
    """Mean seconds of an iteration, evaluations included; None before the second row."""
    times = _known(rows, WALL_S)
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _known(rows: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    return [value for row in rows if (value := row.get(name)) is not None]


def _about_attempts(history: History, now_s: float, mean_s: float | None) -> Iterator[RunFinding]:
    if not history.attempts:
        return
    last = history.attempts[-1]
    log = f"attempts/{last.number:03d}.log"
    if history.state in _ENDED:
        yield RunFinding(
            "ended",
            f"Attempt {last.number} on {last.host} {_ENDED[history.state]}.",
            f"Read {log}; the same `spotlight train` command goes on from the last checkpoint.",
            serious=True,
        )
    elif history.state == "stopped":
        yield RunFinding("stopped", "The run was stopped.", "The same `spotlight train` command goes on.")
    # A run without a cluster bills when a phase ends, which may take most of an iteration.
    elif history.state == "running" and now_s - last.seen_at > (
        UNSEEN_AT_FIRST_S_MAX if mean_s is None else max(UNSEEN_S_MAX, 2 * mean_s)
    ):
        yield RunFinding(
            "silent_run",
            f"Attempt {last.number} has billed nothing for {(now_s - last.seen_at) / 60:.0f} minutes.",
            f"See whether process {last.pid} on {last.host} lives, and read {log}.",
            serious=True,
        )


def _about_damage(lines: Sequence[int]) -> Iterator[RunFinding]:
    if lines:
        shown = ", ".join(map(str, lines[:_LINES_SHOWN])) + ", ..." * (len(lines) > _LINES_SHOWN)
        yield RunFinding(
            "damaged_metrics",
            f"{len(lines)} lines of metrics.jsonl are no rows: {shown}. The charts leave them out; "
            "the next checkpoint or resume fails.",
            "Delete those lines.",
            serious=True,
        )


def _about_seconds(seconds: Mapping[Phase, float]) -> Iterator[RunFinding]:
    total = sum(seconds.values())
    if total < _WORKED_S_MIN:
        return
    lost, idle = seconds.get(Phase.LOST, 0.0) / total, seconds.get(Phase.IDLE, 0.0) / total
    if lost > LOST_SHARE_MAX:
        yield RunFinding(
            "lost",
            f"{lost:.0%} of the worker-seconds were lost; expected at most {LOST_SHARE_MAX:.0%}.",
            "Make checkpoints more often (checkpoint.every); where nodes vanish without a notice, run "
            "`spotlight notices` on one.",
        )
    if idle > IDLE_SHARE_MAX:
        yield RunFinding(
            "idle",
            f"{idle:.0%} of the worker-seconds were idle; expected at most {IDLE_SHARE_MAX:.0%}.",
            "Overlap rollouts and training (pipeline.axis, pipeline.next_share), or explore seeds "
            "(exploration); `spotlight plan` says how many nodes pay.",
        )


def _about_samples(history: History) -> Iterator[RunFinding]:
    drops = {
        reason: number for reason, number in history.counts.train_dropped.items() if not reason.by_choice
    }
    dropped = sum(drops.values())
    trained = history.counts.trained
    # Samples are dropped before the first of an iteration are trained: until then, of all that were issued.
    ended = dropped + trained if trained else history.counts.issued.get(Purpose.TRAIN, 0)
    if ended >= _SAMPLES_MIN and dropped / ended > DROPPED_SHARE_MAX:
        reasons = ", ".join(f"{number} {reason.value}" for reason, number in drops.items())
        rest = "" if trained else "; none is trained"
        yield RunFinding(
            "dropped",
            f"{dropped / ended:.0%} of the train samples were dropped ({reasons}){rest}.",
            "See the reasons under Log; rewards that fail or are late: `spotlight rewards check NAME`, "
            "rewards[].deadline_s.",
        )


def _about_notices(history: History) -> Iterator[RunFinding]:
    unnoticed = history.preemptions - history.noticed
    if unnoticed > history.noticed:
        yield RunFinding(
            "unnoticed",
            f"{unnoticed} of {history.preemptions} spot nodes vanished without a notice.",
            "Run `spotlight notices` on a spot node; see fleet.notices.cloud.",
        )


def _about_spot(gone_at: float | None, now_s: float, limits: RunLimits) -> Iterator[RunFinding]:
    if gone_at is not None and now_s - gone_at > 60 * limits.no_spot_min:
        yield RunFinding(
            "no_spot_node",
            f"There has been no spot node for {(now_s - gone_at) / 60:.0f} minutes.",
            "See the cloud's quota and prices; until one comes, only reserved nodes work, if there are any.",
        )


def _about_rewards(rewards: Sequence[float]) -> Iterator[RunFinding]:
    if len(rewards) < 2 * _MEAN_OF:
        return
    means = [sum(rewards[at - _MEAN_OF : at]) / _MEAN_OF for at in range(_MEAN_OF, len(rewards) + 1)]
    newest, best = means[-1], max(means)
    if best > 0 and newest < COLLAPSED_SHARE * best:
        yield RunFinding(
            "reward_collapse",
            f"The mean reward of the last {_MEAN_OF} iterations is {newest:.3g}; it was {best:.3g} before.",
            "See the pictures; lower learner.learning_rate, or raise algorithm.kl_weight where there is one.",
            serious=True,
        )


def _about_trends(rows: Sequence[Mapping[str, float | None]]) -> Iterator[RunFinding]:
    rewards = _known(rows, REWARD)
    found = trend(rewards)
    if found is None:
        return
    if found.strength < CLEAR:
        yield RunFinding(
            "reward_does_not_rise",
            f"The mean reward has not clearly risen in the newest {TREND_OF} iterations: {found.begin:.3g} "
            f"to {found.end:.3g}, {found.strength:.1f} standard errors.",
            "If it is to rise further: another learner.learning_rate, a larger rollout.group_size, a lower "
            "reference_weight or kl_weight; docs/howto/reward-does-not-rise.md says how to tell which.",
        )
    begin = f"{REWARD.rpartition('/')[0]}/"
    names = {name for row in rows for name in row if name.startswith(begin) and name != REWARD}
    alone = [name for name in sorted(names) if "/" not in name.removeprefix(begin)]
    for name in falling_rewards(rewards, {name: _known(rows, name) for name in alone}):
        yield RunFinding(
            "reward_hacked",
            f"The weighted sum of the rewards rises while {name.removeprefix(begin)} falls.",
            "See the pictures: what rises may be a reader that is fooled. Raise that reward's weight, or "
            "algorithm.reference_weight or kl_weight.",
            serious=True,
        )


def _about_held_out(validations: Sequence[Validated]) -> Iterator[RunFinding]:
    if (best := is_worse_than_best(validations)) is not None:
        newest = validations[-1]
        yield RunFinding(
            "worse_than_best",
            f"The newest validation ({newest.score:.3g} at iteration {newest.iteration}) is clearly below "
            f"the best ({best.score:.3g} at {best.iteration}).",
            "Lower learner.learning_rate, or raise algorithm.reference_weight or kl_weight.",
        )


def _about_limits(outlook: RunOutlook, limits: RunLimits) -> Iterator[RunFinding]:
    if limits.budget_usd is not None and outlook.usd is not None and outlook.usd > limits.budget_usd:
        yield RunFinding(
            "budget",
            f"The whole run will cost ${outlook.usd:,.2f}, of a budget of ${limits.budget_usd:,.2f}.",
            "Fewer iterations, or fewer or cheaper nodes: `spotlight plan` compares them.",
            serious=True,
        )
    if limits.deadline_h is not None and outlook.hours is not None and outlook.hours > limits.deadline_h:
        yield RunFinding(
            "deadline",
            f"The whole run will take {outlook.hours:,.1f} h, of {limits.deadline_h:,.1f} h.",
            "Fewer iterations, or more nodes: `spotlight plan` says which pay.",
            serious=True,
        )


def _about_gpus(rows: Sequence[Mapping[str, float | None]]) -> Iterator[RunFinding]:
    for name, curve, what, remedy in (
        (
            "rollouts_wait",
            ROLLOUT_MFU,
            "Rollouts",
            "Denoise more pictures at once (rollout.batch_size), or set model.cuda_graphs=true if it may",
        ),
        (
            "training_waits",
            TRAIN_MFU,
            "Updates",
            "Train more at once (learner.micro_batch_size, learner.timesteps_per_pass)",
        ),
    ):
        newest = _known(rows[-_MEAN_OF:], curve)
        if len(newest) == _MEAN_OF and max(newest) < MFU_MIN:
            yield RunFinding(
                name,
                f"{what} use {max(newest):.0%} of the GPU's peak (MFU); expected at least {MFU_MIN:.0%}: the "
                "GPU waits for the host, or batches are too small.",
                f"{remedy}; `spotlight doctor --gpu` says what this card reaches.",
            )


def _about_learning(rows: Sequence[Mapping[str, float | None]]) -> Iterator[RunFinding]:
    silent = _newest_mean(rows, SILENT_GROUPS_SHARE)
    if silent > SILENT_SHARE_MAX:
        yield RunFinding(
            "silent_groups",
            f"In {silent:.0%} of the newest groups all chosen rewards are equal: they teach nothing.",
            "Harder or easier prompts, a finer reward, or a larger rollout.group_size.",
            serious=True,
        )
    clipped = _newest_mean(rows, CLIPPED_SHARE)
    if clipped > CLIPPED_SHARE_MAX:
        yield RunFinding(
            "clipped",
            f"{clipped:.0%} of the newest ratios lie outside the clip range.",
            "Lower learner.learning_rate or learner.updates_per_batch; see algorithm.clip_range.",
        )
    gradients = _known(rows[-_MEAN_OF:], GRADIENT)
    if gradients and sum(gradients) / len(gradients) < 1:
        yield RunFinding(
            "epsilon_swamps",
            f"The gradient's RMS is {sum(gradients) / len(gradients):.2g} of AdamW's epsilon: steps are "
            "smaller than the learning rate says.",
            "Lower learner.epsilon (1e-15 for losses of mean log-probs).",
        )
    if rows and rows[-1].get(LOSS, 0.0) is None:
        yield RunFinding(
            "loss_not_a_number",
            "The newest loss is not a number.",
            "Lower learner.learning_rate.",
            serious=True,
        )


def _newest_mean(rows: Sequence[Mapping[str, float | None]], name: str) -> float:
    """Of the last rows; 0 if none has it."""
    values = _known(rows[-_MEAN_OF:], name)
    return sum(values) / len(values) if values else 0.0
