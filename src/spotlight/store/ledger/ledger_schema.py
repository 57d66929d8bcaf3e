"""The tables of ``ledger.sqlite``.

Rows of the eight record tables are insert-only (triggers refuse updates); each carries the number of the
controller record that made it. Constraints enforce the accounting:

- an outcome belongs to an issued rollout, which has at most one;
- only train rollouts are trained, only evaluation rollouts evaluated, only exploration rollouts explored;
- a trained rollout was finished, and its optimizer step exists by the end of the transaction;
- a sample left out by choice was finished, for training;
- a rollout is finished once, by the policy version it requires, and each of its scores is recorded once;
- only previews stop early;
- a preview is kept as the sample of at most one rollout (``kept_previews``, part of the sample's record).

The other tables (attempts, workers, GPU-seconds, incidents, rollbacks, filled seconds, scorers, leases,
prompt files, checkpoints, changes of course) record how the work went rather than what was decided. Their
rows are unnumbered and, except filled seconds, survive a rollback.
"""

from __future__ import annotations

from enum import StrEnum

from spotlight.scheduler.types import DropReason, Filler, Phase, Purpose

SCHEMA_VERSION = 14
UPGRADABLE_VERSION = 2
"""Oldest readable version, upgraded on the first write: it lacks ``filled_seconds``, ``scorers``, ``leases``,
``kept_previews``, ``prompt_files``, ``checkpoints`` and ``course_changes``, and ``outcomes`` refuses samples
left out by choice and previews that stopped early.
"""
APPLICATION_ID = 0x53504F54
"""Identifies the file as a Spotlight ledger (``SPOT``), so that another database is refused."""


class Ending(StrEnum):
    """How an attempt (one process working on the run) ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    KILLED = "killed"


class Incident(StrEnum):
    """An event that hit the cluster."""

    NODE_JOINED = "node_joined"
    NODE_NOTICED = "node_noticed"
    NOTICE_CANCELLED = "notice_cancelled"
    NODE_DRAINED = "node_drained"
    NODE_LOST = "node_lost"
    WORKER_CRASHED = "worker_crashed"
    LEARNER_LOST = "learner_lost"
    LEARNER_WAITS = "learner_waits"
    LEARNER_PLACED = "learner_placed"
    ON_DEMAND = "on_demand"
    """A node on demand is taken for the learner, left or given back: the detail says which."""
    SPOT_TARGET = "spot_target"
    """How many spot nodes are asked for to hold a deadline or a budget, and what the rest takes and costs."""
    NODE_RETURNED = "node_returned"
    """A spot node is given back; that it is gone then is no preemption."""
    COURSE_CHANGED = "course_changed"
    """From an iteration on the run has another value of the key that is its subject."""


class RolloutOutcome(StrEnum):
    """How a rollout ended."""

    TRAINED = "trained"
    DROPPED = "dropped"
    EVALUATED = "evaluated"
    EXPLORED = "explored"


RECORD_TABLES = (
    "prompts",
    "rollouts",
    "samples",
    "rewards",
    "optimizer_steps",
    "outcomes",
    "versions",
    "rejected",
)
"""Parents before children: a rollback deletes in the reverse order."""


def _one_of(kind: type[StrEnum]) -> str:
    return ", ".join(f"'{member.value}'" for member in kind)


BY_CHOICE = ", ".join(f"'{reason.value}'" for reason in DropReason if reason.by_choice)
"""SQL list of the reasons for which a scored sample may be left out."""

_OUTCOMES = f"""
-- A rollout and its step become part of one transaction in either order, hence the deferred key.
CREATE TABLE outcomes (
    seq INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ({_one_of(RolloutOutcome)})),
    optimizer_step INTEGER REFERENCES optimizer_steps (version) DEFERRABLE INITIALLY DEFERRED,
    reason TEXT CHECK (reason IN ({_one_of(DropReason)})),
    detail TEXT,
    finished TEXT GENERATED ALWAYS AS
        (CASE WHEN kind <> 'dropped' OR reason IN ({BY_CHOICE}) THEN rollout END) STORED
        REFERENCES samples (rollout),
    FOREIGN KEY (rollout, purpose) REFERENCES rollouts (id, purpose),
    CHECK ((kind = 'trained') = (optimizer_step IS NOT NULL)),
    CHECK ((kind = 'dropped') = (reason IS NOT NULL AND detail IS NOT NULL)),
    CHECK (reason IS NULL OR reason NOT IN ({BY_CHOICE}) OR purpose = 'train'),
    CHECK (reason IS NOT '{DropReason.STOPPED_EARLY.value}' OR purpose = 'explore'),
    CHECK (kind = 'dropped'
        OR kind || ' ' || purpose IN ('trained train', 'evaluated eval', 'explored explore'))
) STRICT;
CREATE INDEX outcomes_of_step ON outcomes (optimizer_step);
CREATE INDEX outcomes_of_finished ON outcomes (finished);
"""

_RECORDS = f"""
CREATE TABLE prompts (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    text TEXT NOT NULL,
    metadata TEXT NOT NULL CHECK (json_valid(metadata))
) STRICT;

CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL CHECK (purpose IN ({_one_of(Purpose)})),
    iteration INTEGER NOT NULL CHECK (iteration >= 0),
    prompt TEXT NOT NULL REFERENCES prompts (id),
    member INTEGER NOT NULL CHECK (member >= 0),
    seed INTEGER NOT NULL CHECK (seed >= 0),
    steps INTEGER NOT NULL CHECK (steps > 0),
    version INTEGER NOT NULL CHECK (version >= 0),
    UNIQUE (id, purpose),
    UNIQUE (id, version)
) STRICT;
CREATE INDEX rollouts_of_prompt ON rollouts (prompt);

CREATE TABLE samples (
    seq INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL UNIQUE,
    version INTEGER NOT NULL,
    worker TEXT NOT NULL,
    epoch INTEGER NOT NULL CHECK (epoch >= 0),
    FOREIGN KEY (rollout, version) REFERENCES rollouts (id, version)
) STRICT;

-- value is NULL where the score is not a number.
CREATE TABLE rewards (
    seq INTEGER NOT NULL,
    rollout TEXT NOT NULL REFERENCES samples (rollout),
    name TEXT NOT NULL,
    value REAL,
    PRIMARY KEY (rollout, name)
) STRICT;
CREATE INDEX rewards_by_seq ON rewards (seq);

-- version: the policy version the step made.
CREATE TABLE optimizer_steps (
    seq INTEGER PRIMARY KEY,
    version INTEGER NOT NULL UNIQUE CHECK (version > 0),
    iteration INTEGER NOT NULL CHECK (iteration >= 0),
    update_index INTEGER NOT NULL CHECK (update_index >= 0),
    samples INTEGER NOT NULL CHECK (samples > 0),
    loss REAL,
    grad_norm REAL,
    UNIQUE (iteration, update_index)
) STRICT;

{_OUTCOMES}
CREATE TABLE versions (
    seq INTEGER PRIMARY KEY,
    version INTEGER NOT NULL UNIQUE CHECK (version >= 0)
) STRICT;

-- A refused commit may name a rollout that was rolled back since, hence no key.
CREATE TABLE rejected (
    seq INTEGER PRIMARY KEY,
    rollout TEXT,
    reason TEXT NOT NULL
) STRICT;
"""

_INCIDENTS = f"""
-- subject: the node or worker concerned; spot: whether that was preemptible.
CREATE TABLE incidents (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    at REAL NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ({_one_of(Incident)})),
    subject TEXT NOT NULL,
    spot INTEGER NOT NULL CHECK (spot IN (0, 1)),
    detail TEXT NOT NULL
) STRICT;
"""

_WORK = f"""
-- Times are seconds since the epoch. seen_at: the last time the attempt accounted for its GPU seconds.
CREATE TABLE attempts (
    number INTEGER PRIMARY KEY,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    started_at REAL NOT NULL,
    seen_at REAL NOT NULL CHECK (seen_at >= started_at),
    ended_at REAL CHECK (ended_at >= started_at),
    ended TEXT CHECK (ended IN ({_one_of(Ending)})),
    CHECK ((ended_at IS NULL) = (ended IS NULL))
) STRICT;

-- A worker is billed from joined_at until left_at, or for as long as the attempt goes on.
CREATE TABLE attempt_workers (
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    worker TEXT NOT NULL,
    price_usd_h REAL NOT NULL CHECK (price_usd_h >= 0),
    joined_at REAL NOT NULL,
    left_at REAL CHECK (left_at >= joined_at),
    PRIMARY KEY (attempt, worker)
) STRICT;

-- position: the ledger's position when they were spent. was_phase: what lost seconds were spent on,
-- NULL for seconds between an attempt's last account and its death.
CREATE TABLE gpu_seconds (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    worker TEXT NOT NULL,
    position INTEGER NOT NULL CHECK (position >= 0),
    phase TEXT NOT NULL CHECK (phase IN ({_one_of(Phase)})),
    was_phase TEXT CHECK (was_phase IN ({_one_of(Phase)})),
    seconds REAL NOT NULL CHECK (seconds >= 0),
    price_usd_h REAL NOT NULL CHECK (price_usd_h >= 0),
    FOREIGN KEY (attempt, worker) REFERENCES attempt_workers (attempt, worker),
    CHECK (was_phase IS NULL OR phase = 'lost')
) STRICT;

{_INCIDENTS}
CREATE TABLE rollbacks (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    from_position INTEGER NOT NULL,
    to_position INTEGER NOT NULL CHECK (to_position BETWEEN 0 AND from_position)
) STRICT;
"""

_FILLED = f"""
-- GPU seconds by what filled them: billed in their phases too, they are those a GPU would have waited for.
-- position: the ledger's position when they were noted; a rollback takes back those of what it undoes.
CREATE TABLE filled_seconds (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    position INTEGER NOT NULL CHECK (position >= 0),
    iteration INTEGER NOT NULL CHECK (iteration >= 0),
    filler TEXT NOT NULL CHECK (filler IN ({_one_of(Filler)})),
    seconds REAL NOT NULL CHECK (seconds >= 0)
) STRICT;
"""

SCORES_VIEW = """CREATE VIEW scores (rollout, reward, value, scored_by) AS
    SELECT rollout, name, value, (
        SELECT scored_by FROM scorers
        WHERE scorers.reward = substr(rewards.name, 1, instr(rewards.name || '/', '/') - 1)
            AND scorers.position < rewards.seq
        ORDER BY id DESC LIMIT 1)
    FROM rewards"""
"""Every score with what gave it; NULL where the reward does not say, and for the weighted total.

A reward's curves are called ``<reward>`` and ``<reward>/<detail>``.
"""

_SCORERS = f"""
-- Which model, of which weights, gave a reward's scores from the record after position on.
CREATE TABLE scorers (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    position INTEGER NOT NULL CHECK (position >= 0),
    reward TEXT NOT NULL,
    scored_by TEXT NOT NULL,
    UNIQUE (attempt, reward)
) STRICT;
{SCORES_VIEW};
"""

_LEASES = """
-- Where a rollout was: each worker that it was given to, and from which step. Rows survive a rollback, after
-- which a kept sample still names the lease that it was made under; hence no key to rollouts.
-- position: the ledger's position when the lease was written.
CREATE TABLE leases (
    rollout TEXT NOT NULL,
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    lease INTEGER NOT NULL CHECK (lease > 0),
    position INTEGER NOT NULL CHECK (position >= 0),
    at REAL NOT NULL,
    worker TEXT NOT NULL,
    epoch INTEGER NOT NULL CHECK (epoch >= 0),
    from_step INTEGER NOT NULL CHECK (from_step >= 0),
    PRIMARY KEY (rollout, attempt, lease)
) STRICT, WITHOUT ROWID;
"""

_KEPT = """
-- Samples of train rollouts that were made as previews, and not again. A rollback deletes them with these.
CREATE TABLE kept_previews (
    rollout TEXT PRIMARY KEY REFERENCES samples (rollout) ON DELETE CASCADE,
    preview TEXT NOT NULL UNIQUE REFERENCES rollouts (id)
) STRICT, WITHOUT ROWID;
"""

_PROMPT_FILES = """
-- The prompts of a file that the configuration names as key: a JSON list of ids in the file's order. Written
-- by the first attempt, and by each that keeps no record of one before.
CREATE TABLE prompt_files (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    position INTEGER NOT NULL CHECK (position >= 0),
    key TEXT NOT NULL,
    prompts TEXT NOT NULL CHECK (json_valid(prompts)),
    UNIQUE (attempt, key)
) STRICT;
"""

_CHECKPOINTS = """
-- Checkpoints that were committed: a run that had one does not start over without. position: theirs.
CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    position INTEGER NOT NULL CHECK (position >= 0),
    iteration INTEGER NOT NULL CHECK (iteration >= 0)
) STRICT;
"""

_COURSE_CHANGES = """
-- With which values of a configuration's keys an iteration and those after it were made: JSON, NULL where the
-- key is absent. Of a fork the key name, too. An attempt that resumes where another did writes its own.
CREATE TABLE course_changes (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL REFERENCES attempts (number),
    position INTEGER NOT NULL CHECK (position >= 0),
    iteration INTEGER NOT NULL CHECK (iteration >= 0),
    key TEXT NOT NULL,
    was TEXT CHECK (json_valid(was)),
    now TEXT CHECK (json_valid(now))
) STRICT;
"""

INDEXES = """
CREATE INDEX IF NOT EXISTS gpu_seconds_by_position ON gpu_seconds (position);
CREATE INDEX IF NOT EXISTS leases_by_number ON leases (attempt, lease);
CREATE INDEX IF NOT EXISTS leases_by_position ON leases (position);
"""
"""Of what pages ask while a run writes. Made when a ledger is opened for writing: older ones lack them."""


_OF_WORK = (
    "leases",
    "gpu_seconds",
    "filled_seconds",
    "scorers",
    "prompt_files",
    "checkpoints",
    "course_changes",
)
CUT = (
    *(f"DELETE FROM {table} WHERE seq > :position" for table in reversed(RECORD_TABLES)),
    *(f"DELETE FROM {table} WHERE position > :position OR attempt > :attempt" for table in _OF_WORK),
    "DELETE FROM rollbacks WHERE from_position > :position OR attempt > :attempt",
    "DELETE FROM incidents WHERE attempt > :attempt",
    "DELETE FROM attempt_workers WHERE attempt > :attempt",
    "DELETE FROM attempts WHERE number > :attempt",
    """UPDATE attempt_workers SET left_at = joined_at + (SELECT TOTAL(seconds) FROM gpu_seconds AS spent
        WHERE spent.attempt = attempt_workers.attempt AND spent.worker = attempt_workers.worker)
    WHERE attempt = :attempt""",
    f"""UPDATE attempts SET ended = '{Ending.STOPPED.value}', (ended_at, seen_at) =
        (SELECT MAX(started_at, COALESCE(MAX(left_at), 0)), MAX(started_at, COALESCE(MAX(left_at), 0))
            FROM attempt_workers WHERE attempt = number)
    WHERE number = :attempt""",
    "DELETE FROM incidents WHERE attempt = :attempt "
    "AND at > (SELECT ended_at FROM attempts WHERE number = :attempt)",
)
"""Leave what was before a checkpoint of an attempt, as if the attempt had ended there."""


def _insert_only(table: str) -> str:
    return (
        f"CREATE TRIGGER {table}_insert_only BEFORE UPDATE ON {table} "
        f"BEGIN SELECT RAISE(ABORT, '{table} is insert-only'); END;"
    )


_INSERT_ONLY = "\n".join(map(_insert_only, RECORD_TABLES))

SCHEMA = "\n".join(
    (
        _RECORDS,
        _WORK,
        _FILLED,
        _SCORERS,
        _LEASES,
        _KEPT,
        _PROMPT_FILES,
        _CHECKPOINTS,
        _COURSE_CHANGES,
        _INSERT_ONLY,
        f"PRAGMA application_id = {APPLICATION_ID};",
        f"PRAGMA user_version = {SCHEMA_VERSION};",
    )
)
_OUTCOMES_AGAIN = f"""
ALTER TABLE outcomes RENAME TO outcomes_before;
DROP INDEX outcomes_of_step;
DROP INDEX outcomes_of_finished;
{_OUTCOMES}
INSERT INTO outcomes (seq, rollout, purpose, kind, optimizer_step, reason, detail)
    SELECT seq, rollout, purpose, kind, optimizer_step, reason, detail FROM outcomes_before;
DROP TABLE outcomes_before;
{_insert_only("outcomes")}
"""
_INCIDENTS_AGAIN = f"""
ALTER TABLE incidents RENAME TO incidents_before;
{_INCIDENTS}
INSERT INTO incidents (id, attempt, at, kind, subject, spot, detail)
    SELECT id, attempt, at, kind, subject, spot, detail FROM incidents_before;
DROP TABLE incidents_before;
"""
_ADDED = {
    3: _FILLED,
    4: _SCORERS,
    5: _OUTCOMES_AGAIN,
    6: _INCIDENTS_AGAIN,
    7: _INCIDENTS_AGAIN + _LEASES,
    8: _INCIDENTS_AGAIN,
    9: _KEPT,
    10: _OUTCOMES_AGAIN,
    11: _INCIDENTS_AGAIN,
    12: _PROMPT_FILES,
    13: _CHECKPOINTS,
    14: _INCIDENTS_AGAIN + _COURSE_CHANGES,
}
"""What each version added."""


def upgrade_from(version: int) -> str:
    """The statements that bring a ledger of an older version to this one."""
    added = [statements for later, statements in _ADDED.items() if later > version]
    return "\n".join((*added, f"PRAGMA user_version = {SCHEMA_VERSION};"))
