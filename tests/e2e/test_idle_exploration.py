"""Seed exploration in idle time on a real Ray: spot workers make previews while the learner trains."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from main_job import Job, clean_audit
from ray_job import running

from spotlight.scheduler.policies.selection import SelectionPolicy, select
from spotlight.scheduler.types import Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths

OVERRIDES = (
    "algorithm.name=diffusion-nft",
    "algorithm.train_timesteps=2",
    "iterations=2",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "evaluation.every=9",
    "learner.micro_batch_size=2",
    "rewards=[{name: 'reward_functions:moody'}]",
    "fleet.driver=ray",
    "fleet.spot.nodes=2",
    "exploration={where: idle, seeds_per_prompt: 6, steps: 2, seeds_per_prompt_max: 12}",
)
WHILE_TRAINING = """
SELECT iteration, count(*) FROM (
    SELECT step.iteration AS iteration, samples.seq AS made, step.seq AS stepped, (
        SELECT max(rewards.seq) FROM rewards JOIN rollouts AS own ON own.id = rewards.rollout
        WHERE own.purpose = 'train' AND own.iteration = step.iteration
    ) AS scored
    FROM optimizer_steps AS step
    JOIN rollouts ON rollouts.purpose = 'explore' AND rollouts.iteration = step.iteration + 1
    JOIN samples ON samples.rollout = rollouts.id
) WHERE scored < made AND made < stepped GROUP BY iteration
"""
"""Previews for the next iteration, made between an iteration's last score and its optimizer step."""
POOLS = """
SELECT iteration, prompt, rollouts.purpose, seed, value FROM rollouts
JOIN outcomes ON outcomes.rollout = rollouts.id AND kind IN ('explored', 'trained')
JOIN rewards ON rewards.rollout = rollouts.id AND name = 'reward'
"""


def read(run: Path, query: str) -> list[tuple[object, ...]]:
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        return list(connection.execute(query))


@pytest.mark.slow  # it starts a Ray, and trains on it for a while
def test_spot_workers_explore_while_the_learner_trains(job: Job) -> None:
    run = job.root / "beside"
    with running(run, job.arguments("beside", *OVERRIDES)) as it:
        assert it.end() == 0, it.printed
    report = clean_audit(run, AuditLimits(group_size=4))
    assert report.counts.trained == 2 * 2 * 4
    assert report.gpu_seconds_by_phase[Phase.EXPLORATION] > 0

    made = dict(read(run, WHILE_TRAINING))
    assert set(made) == {0}, "while the last iteration trains, nothing is left to explore for"
    makers = read(
        run, "SELECT DISTINCT worker FROM samples JOIN rollouts ON id = rollout WHERE purpose = 'explore'"
    )
    assert makers
    assert all(str(worker).startswith("spot-") for (worker,) in makers)

    previews: dict[tuple[object, object], dict[int, float]] = {}
    trained: dict[tuple[object, object], set[object]] = {}
    for iteration, prompt, purpose, seed, value in read(run, POOLS):
        assert isinstance(seed, int)
        assert isinstance(value, float)
        if purpose == "explore":
            previews.setdefault((iteration, prompt), {})[seed] = value
        elif purpose == "train":
            trained.setdefault((iteration, prompt), set()).add(seed)
    assert {iteration for iteration, _ in previews} == {1}
    for key, pool in previews.items():
        assert 4 < len(pool) <= 12
        assert trained[key] == set(select(pool, 4, SelectionPolicy.MAX_VARIANCE).seeds)
    rows = [row.values for row in read_metrics(run) if "exploration/staleness" in row.values]
    assert [row["exploration/staleness"] for row in rows] == [1]
