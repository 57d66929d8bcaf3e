"""A run on a local Ray with everything overlapping outlives its head; each mechanism had work."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from kept_pictures import training_pictures
from main_job import Job, clean_audit, lora
from ray_job import PATIENCE_S, running

from spotlight.scheduler.types import Filler, Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import read_summary

OVERLAPPED = (
    "iterations=3",
    "algorithm={name: diffusion-nft, train_timesteps: 1, advantage: {std: group}}",
    "rollout={steps: 24, prompts_per_iteration: 4, group_size: 6, batch_size: 4}",
    "learner={micro_batch_size: 3, learning_rate: 0.001}",
    "evaluation={every: 9, grid_prompts: 2, images_per_prompt: 2, grid_images: 2}",
    "exploration={where: idle, seeds_per_prompt: 8, steps: 2}",
    "pipeline={axis: generation, slice_size: 3, baseline: slice, trainers_generate: true, next_share: 0.5}",
    "fleet={driver: ray, local: {rollout_slots: 1, threads: 1}}",
    "fleet.spot.nodes=0",
)
"""Many steps and one trained timestep: generation takes so much longer that the learner's slots must help."""
SAMPLES = 3 * 4 * 6
MADE = "FROM samples JOIN rollouts ON id = rollout WHERE purpose = 'train'"


def count(run: Path, query: str) -> int:
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        return int(connection.execute(query).fetchone()[0])


@pytest.mark.slow  # test_ray_run.py kills a head in the first tier; parts and overlap have tests of their own
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_with_every_switch_on_the_head_is_killed_and_each_mechanism_did_its_part(
    job: Job, ranks: int
) -> None:
    run = job.root / f"overlapped-{ranks}"
    arguments = job.arguments(run.name, *OVERLAPPED, f"fleet.learner_ranks={ranks}")
    with running(run, arguments) as it:
        # Not one that began early: there would be nothing to lose yet.
        it.wait_for(f"SELECT 1 {MADE} AND iteration = 1 AND rollouts.version = 1")
        it.kill_head()
    assert not (run / "summary.json").exists()
    with running(run, arguments) as it:
        assert it.end(2 * PATIENCE_S) == 0, it.printed
        printed = it.printed
        assert "resuming after iteration" in printed
        it.require_nothing_left()
    report = clean_audit(run, AuditLimits(group_size=6, staleness_max=1))
    assert report.counts.trained == SAMPLES
    assert report.counts.optimizer_steps == 3
    assert read_summary(run / "summary.json").samples.trained == SAMPLES
    assert lora(run)
    assert [len(files) for files in training_pictures(run).values()] == [8, 8]
    assert not list(run.rglob(".writing-*"))
    # One optimizer step an iteration: versions are numbers of iterations.
    assert count(run, f"SELECT COUNT(*) {MADE} AND rollouts.version = iteration - 1") > 0, printed
    assert count(run, f"SELECT COUNT(*) {MADE} AND worker LIKE 'reserved-0/learner/%'") > 0, printed
    assert count(run, f"SELECT COUNT(*) {MADE} AND worker LIKE 'reserved-0/rollout/%'") > 0, printed
    rows = [row.values for row in read_metrics(run) if "train/loss" in row.values]
    assert sum(row["pipeline/overlapped_samples"] for row in rows) > 0
    assert sum(row["pipeline/early_samples"] for row in rows) > 0
    assert sum(row["pipeline/trainers_s"] for row in rows if "pipeline/trainers_s" in row) > 0
    assert [row["train/samples"] for row in rows] == [SAMPLES / 3] * 3
    # Some slots train and one does not; each second of each is in one phase.
    phases = report.gpu_seconds_by_phase
    assert [bill.ended for bill in report.attempts] == [Ending.KILLED, Ending.FINISHED]
    assert sum(phases.values()) == pytest.approx(sum(bill.billed_s for bill in report.attempts), abs=0.5)
    assert phases[Phase.LOST] > 0
    assert phases[Phase.TRAINING] > 0
    assert phases[Phase.ROLLOUT] > 0
    filled = report.filled_s
    assert {Filler.TRAINING, Filler.NEXT} <= set(filled)
    assert 0 < filled[Filler.TRAINING] <= phases[Phase.TRAINING] + 0.5
    assert 0 < filled[Filler.TRAINERS] + filled[Filler.NEXT] <= phases[Phase.ROLLOUT] + 0.5
