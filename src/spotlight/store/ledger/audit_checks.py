"""The ledger's invariants as SQL: each check is a query whose rows are violations.

The schema prevents most already; recounting also detects a ledger that was edited, merged or damaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotlight.scheduler.records import REWARD
from spotlight.store.ledger.ledger_schema import BY_CHOICE, RECORD_TABLES


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant.

    Attributes:
        broken: what a row of ``query`` means.
        query: returns ids of violations (first column). Parameters: ``:finished`` (1 if the last attempt
            finished the run), ``:limits``, a JSON list of the configuration's limits, the oldest first:
            each has the iteration that it ends before (``until``), ``group_size``, ``train_samples`` (of each
            group; both NULL if unknown) and ``staleness_max``.
    """

    name: str
    broken: str
    query: str


_USED = f"(kind <> 'dropped' OR reason IN ({BY_CHOICE}))"
"""Outcomes of samples that were used, or left out only because of their rewards."""
_SEQUENCE = " UNION ALL ".join(f"SELECT DISTINCT seq FROM {table}" for table in RECORD_TABLES)


def _limit(name: str, iteration: str) -> str:
    """SQL of a limit at an iteration."""
    return (
        f"(SELECT value ->> '{name}' FROM json_each(:limits) WHERE value ->> 'until' IS NULL "
        f"OR {iteration} < value ->> 'until' ORDER BY key LIMIT 1)"
    )


CHECKS = (
    Check(
        "numbering",
        "record numbers used twice, or missing",
        f"""
        WITH sequence AS ({_SEQUENCE}),
        used AS (SELECT seq, COUNT(*) AS times, LAG(seq, 1, 0) OVER (ORDER BY seq) AS before
            FROM sequence GROUP BY seq)
        SELECT seq FROM used WHERE times > 1 OR seq <> before + 1
        """,
    ),
    Check(
        "one-outcome",
        "rollouts with more than one outcome",
        "SELECT rollout FROM outcomes GROUP BY rollout HAVING COUNT(*) > 1",
    ),
    Check(
        "issued",
        "outcomes or samples of rollouts never issued",
        """
        SELECT rollout FROM (SELECT rollout FROM outcomes UNION SELECT rollout FROM samples)
        WHERE rollout NOT IN (SELECT id FROM rollouts)
        """,
    ),
    Check(
        "in-flight",
        "rollouts without an outcome, though the run is finished",
        "SELECT id FROM rollouts WHERE :finished AND id NOT IN (SELECT rollout FROM outcomes)",
    ),
    Check(
        "order",
        "rollouts with a record before the one it builds on (prompt, issue, sample, reward, outcome)",
        """
        SELECT rollouts.id FROM rollouts LEFT JOIN prompts ON prompts.id = rollouts.prompt
        LEFT JOIN samples ON samples.rollout = rollouts.id
        LEFT JOIN (SELECT rollout, MIN(seq) AS seq FROM rewards GROUP BY rollout) AS scored
            ON scored.rollout = rollouts.id
        LEFT JOIN outcomes ON outcomes.rollout = rollouts.id
        WHERE prompts.id IS NULL OR prompts.seq > rollouts.seq OR samples.seq < rollouts.seq
            OR scored.seq < COALESCE(samples.seq, scored.seq + 1)
            OR outcomes.seq < MAX(rollouts.seq, COALESCE(samples.seq, 0), COALESCE(scored.seq, 0))
        """,
    ),
    Check(
        "used-for-its-purpose",
        "rollouts trained, evaluated or explored against their purpose",
        """
        SELECT rollout FROM outcomes JOIN rollouts ON rollouts.id = outcomes.rollout WHERE
            kind <> 'dropped' AND (kind, rollouts.purpose) NOT IN
            (VALUES ('trained', 'train'), ('evaluated', 'eval'), ('explored', 'explore'))
        """,
    ),
    Check(
        "used-was-finished",
        "samples used, or left out by choice, without having been finished",
        f"""
        SELECT rollout FROM outcomes WHERE {_USED}
            AND rollout NOT IN (SELECT rollout FROM samples)
        """,
    ),
    Check(
        "used-was-rewarded",
        "samples used, or left out by choice, without a finite reward",
        f"""
        SELECT rollout FROM outcomes WHERE {_USED} AND rollout NOT IN
            (SELECT rollout FROM rewards WHERE name = '{REWARD}' AND ABS(value) <= 1.7976931348623157e308)
        """,
    ),
    Check(
        "stopped-early",
        "previews that stopped early, and were finished or kept",
        """
        SELECT rollout FROM outcomes WHERE reason = 'stopped_early'
            AND (purpose <> 'explore' OR rollout IN (SELECT rollout FROM samples))
        """,
    ),
    Check(
        "trained-once",
        "trained samples whose optimizer step is not there exactly once",
        """
        SELECT rollout FROM outcomes WHERE kind = 'trained' AND 1 <>
            (SELECT COUNT(*) FROM optimizer_steps WHERE version = outcomes.optimizer_step)
        """,
    ),
    Check(
        "version",
        "samples made by another policy version than their rollout needs",
        """
        SELECT rollout FROM samples JOIN rollouts ON rollouts.id = samples.rollout
        WHERE samples.version <> rollouts.version
        """,
    ),
    Check(
        "published",
        "samples made by a policy version before it was published",
        """
        SELECT samples.rollout FROM samples LEFT JOIN versions ON versions.version = samples.version
        WHERE samples.version > 0 AND COALESCE(versions.seq, samples.seq) >= samples.seq
        """,
    ),
    Check(
        "step-size",
        "optimizer steps whose number of samples is not what was trained",
        """
        SELECT version FROM optimizer_steps WHERE samples <> (SELECT COUNT(*) FROM outcomes
            WHERE kind = 'trained' AND optimizer_step = optimizer_steps.version)
        """,
    ),
    Check(
        "step-numbers",
        "optimizer steps that do not continue the one before them",
        """
        SELECT version FROM
            (SELECT version, LAG(version, 1, 0) OVER (ORDER BY seq) AS before FROM optimizer_steps)
        WHERE version <> before + 1
        """,
    ),
    Check(
        "group-size",
        "groups of train rollouts with members missing or surplus (a prompt drawn twice counts twice; one"
        " dropped as stale was issued again)",
        f"""
        WITH members AS (SELECT iteration, prompt, member, COUNT(*) AS times FROM rollouts
            LEFT JOIN outcomes ON outcomes.rollout = rollouts.id
            WHERE rollouts.purpose = 'train' AND outcomes.reason IS NOT 'stale'
            GROUP BY iteration, prompt, member),
        found AS (SELECT iteration, prompt, COUNT(*) AS size, MAX(member) + 1 AS expected,
            MIN(times) AS least, MAX(times) AS most FROM members GROUP BY iteration, prompt)
        SELECT iteration || '/' || prompt FROM found WHERE size <> expected OR least <> most
            OR size <> COALESCE({_limit("group_size", "found.iteration")},
                (SELECT MAX(size) FROM found AS others WHERE others.iteration = found.iteration))
        """,
    ),
    Check(
        "train-samples",
        "groups of which another number of samples was trained than configured",
        # A rollout's id is that of its group, and its number within it. Samples that kept ranks from sharing
        # evenly, and silent ones, were chosen too.
        f"""
        WITH found AS (SELECT rtrim(rollouts.id, '0123456789r') AS of, COUNT(*) AS size, iteration,
            COUNT(outcomes.rollout) AS ended, TOTAL(reason IS 'not_chosen') AS left_out,
            TOTAL(kind = 'trained' OR reason IN ('uneven_batch', 'silent_group')) AS chosen
            FROM rollouts LEFT JOIN outcomes ON outcomes.rollout = rollouts.id
            WHERE rollouts.purpose = 'train' GROUP BY of)
        SELECT of FROM (SELECT *, COALESCE({_limit("train_samples", "iteration")},
            (SELECT MAX(chosen) FROM found)) AS wanted FROM found)
            WHERE size = ended AND (chosen > wanted OR (left_out > 0 AND chosen <> wanted))
        """,
    ),
    Check(
        "silent",
        "samples left out as of a silent group, though the rewards of those chosen of it differ",
        f"""
        WITH chosen AS (SELECT rtrim(outcomes.rollout, '0123456789r') AS of, outcomes.rollout, reason, value
            FROM outcomes JOIN rewards ON rewards.rollout = outcomes.rollout AND name = '{REWARD}'
            WHERE kind = 'trained' OR reason IN ('uneven_batch', 'silent_group'))
        SELECT rollout FROM chosen WHERE reason = 'silent_group'
            AND of IN (SELECT of FROM chosen GROUP BY of HAVING MIN(value) <> MAX(value))
        """,
    ),
    Check(
        "staleness",
        "samples trained by a policy further from the one that made them than the schedule allows",
        f"""
        WITH began AS (SELECT iteration, MIN(version) - 1 AS version FROM optimizer_steps GROUP BY iteration)
        SELECT outcomes.rollout FROM outcomes
        JOIN optimizer_steps ON optimizer_steps.version = outcomes.optimizer_step
        JOIN began ON began.iteration = optimizer_steps.iteration
        JOIN samples ON samples.rollout = outcomes.rollout
        WHERE kind = 'trained' AND began.version - samples.version NOT BETWEEN 0
            AND {_limit("staleness_max", "began.iteration")}
        """,
    ),
    Check(
        "attempts",
        "attempts that never ended, though another came after them",
        "SELECT number FROM attempts WHERE ended IS NULL AND number < (SELECT MAX(number) FROM attempts)",
    ),
)
