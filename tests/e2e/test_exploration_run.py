"""Seed exploration in real runs of a tiny model: what is trained was chosen by previews, and resumes."""

from __future__ import annotations

import signal
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from main_job import (
    ALGORITHMS,
    GRPO,
    NFT,
    ONE_AT_ONCE,
    At,
    Job,
    clean_audit,
    largest_difference,
    learner_digest,
    outcome,
    run_process,
)

from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler.policies.selection import SelectionPolicy, select
from spotlight.scheduler.types import Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths

SHORT = ("iterations=2", "evaluation.every=9")
EXPLORES = (*GRPO, *SHORT, "exploration={seeds_per_prompt: 7, steps: 2, sampled_prompts: 1}")
PLANNED = (
    *(*NFT, *SHORT),
    "exploration={planner: {seed_counts: [4, 6], step_counts: [2, 3]}}",
)


@dataclass
class Group:
    """What the ledger says of a prompt in an iteration."""

    previews: dict[int, float] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    steps: set[tuple[str, int]] = field(default_factory=set)
    versions: set[int] = field(default_factory=set)


def groups_of(run: Path) -> dict[tuple[int, str], Group]:
    connection = queries.open_readonly(RunPaths(run).ledger)
    try:
        rows = connection.execute(
            "SELECT rollouts.purpose, iteration, prompt, seed, steps, rollouts.version, value, kind"
            " FROM rollouts"
            " JOIN outcomes ON outcomes.rollout = rollouts.id"
            " JOIN rewards ON rewards.rollout = rollouts.id AND name = 'reward'"
            " WHERE rollouts.purpose <> 'eval'"
        ).fetchall()
    finally:
        connection.close()
    groups: dict[tuple[int, str], Group] = {}
    for purpose, iteration, prompt, seed, steps, version, reward, kind in rows:
        group = groups.setdefault((iteration, prompt), Group())
        group.steps.add((purpose, steps))
        group.versions.add(version)
        if purpose == "explore":
            assert kind == "explored"
            group.previews[seed] = reward
        else:
            assert kind == "trained"
            group.trained.add(seed)
    return groups


def test_the_groups_trained_are_those_that_previews_chose(job: Job) -> None:
    recorded = job.train("explored", *EXPLORES)
    run = job.root / "explored"
    groups = groups_of(run)
    assert len(groups) == 4
    by_rank = 0
    for (iteration, _), group in groups.items():
        assert len(group.previews) == 7
        assert group.steps == {("explore", 2), ("train", 3)}
        assert group.versions == {2 * iteration}  # previews with the weights that roll out
        assert len(group.trained) == 3
        assert group.trained < set(group.previews)
        best = select(group.previews, 3, SelectionPolicy.MAX_VARIANCE)
        by_rank += set(best.seeds) == group.trained
    assert by_rank >= 2  # one group an iteration keeps two seeds drawn at random
    report = clean_audit(run)
    assert report.gpu_seconds_by_phase[Phase.EXPLORATION] > 0
    rows = [row.values for row in read_metrics(run) if "exploration/steps" in row.values]
    assert len(rows) == 2
    for row in rows:
        assert (row["exploration/seeds_per_prompt"], row["exploration/steps"]) == (7, 2)
        assert row["exploration/staleness"] == 0
        assert row["exploration/selection/chosen"] == 2
        assert row["exploration/fidelity/reward/sampled"] == 1
        assert -1 <= row["exploration/fidelity/reward/tau"] <= 1
        assert row["exploration/contrast/realised"] > 0
    assert not [note for note in recorded.notes if "explored" in note]  # nothing was to be decided


@pytest.mark.parametrize("algorithm", ONE_AT_ONCE)
def test_previews_that_are_rollouts_are_not_made_again_and_nothing_else_changes(
    job: Job, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One at a time: the same prompt and seed in another batch differ by rounding.
    settings = (*ALGORITHMS[algorithm], *SHORT, "rollout.batch_size=1", "exploration={seeds_per_prompt: 5}")
    name = settings[0].partition("=")[2]
    job.train(f"kept-{name}", *settings)
    monkeypatch.setattr(ExplorationConfig, "makes_rollouts", lambda self, guidance: False)
    job.train(f"again-{name}", *settings)
    kept, again = job.root / f"kept-{name}", job.root / f"again-{name}"
    assert groups_of(kept) == groups_of(again)
    assert scores_of(kept) == scores_of(again)
    assert learner_digest(kept) == learner_digest(again)
    assert largest_difference(kept, again) == 0
    ours, theirs = clean_audit(kept), clean_audit(again)
    assert (ours.counts.kept, theirs.counts.kept) == (2 * 2 * 3, 0)
    assert ours.counts.trained == theirs.counts.trained == 2 * 2 * 3
    assert ours.gpu_seconds_by_phase[Phase.ROLLOUT] == 0
    assert [row.values["exploration/kept"] for row in read_metrics(kept) if row.values.get("train/loss")] == [
        6,
        6,
    ]


def scores_of(run: Path) -> set[tuple[object, ...]]:
    """Every score of the samples for training, by their seeds."""
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        return set(
            connection.execute(
                "SELECT id, seed, name, value FROM rollouts JOIN rewards ON rollout = id"
                " WHERE purpose = 'train'"
            )
        )


def test_a_planned_run_that_is_killed_explores_as_one_that_was_not(job: Job) -> None:
    recorded = job.train("planned", *PLANNED)
    straight = job.root / "planned"
    decided = [note for note in recorded.notes if " explored " in note]
    assert decided[0].startswith("iteration 0 explored 6x3 (seeds x steps): fits, and was not tried yet")
    assert len(decided) == 2
    (first, *_) = (row.values for row in read_metrics(straight) if "exploration/steps" in row.values)
    assert first["exploration/decision/arms/6x3/fits"] == 1
    assert "exploration/decision/capacity/workers" in first

    assert clean_audit(straight).counts.kept == 12
    arguments, answer = job.arguments("planned-killed", *PLANNED), job.root / "planned-killed.json"
    kill = At("work exploration", 4)  # within the second iteration's previews
    assert run_process(arguments, kill, answer=answer).exit_code == -signal.SIGKILL
    ended = run_process(arguments, answer=answer)
    assert ended.finished, ended
    assert outcome(job.root / "planned-killed") == outcome(straight)
    clean_audit(job.root / "planned-killed")
