"""Runs that train a part of what they generate: killed and resumed, on two ranks, on Ray with overlap."""

from __future__ import annotations

import signal
from collections import defaultdict
from contextlib import closing
from itertools import combinations
from pathlib import Path

import pytest
from main_job import NFT, At, Job, clean_audit, largest_difference, outcome, run_process, run_ranks
from ray_job import PATIENCE_S, running
from test_pipeline_run import OVERLAPPED

from spotlight.scheduler.policies.selection import sample_variance
from spotlight.scheduler.types import DropReason
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths

SUBSET = (*NFT, "iterations=2", "rollout.group_size=4", "algorithm.train_samples=2")
TWO_OF_FOUR = AuditLimits(group_size=4, train_samples=2)


def require_best(run: Path) -> None:
    """Of every group the samples trained have the largest variance."""
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        rows = connection.execute(
            "SELECT substr(id, 1, 11), kind, value FROM rollouts JOIN outcomes ON outcomes.rollout = id "
            "JOIN rewards ON rewards.rollout = id AND name = 'reward' WHERE rollouts.purpose = 'train'"
        ).fetchall()
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group, kind, value in rows:
        groups[group][kind].append(value)
    for ends in groups.values():
        trained, left_out = ends["trained"], ends["dropped"]
        best = max(map(sample_variance, combinations(trained + left_out, len(trained))))
        assert sample_variance(trained) == pytest.approx(best)


def test_killed_while_it_trains_a_run_chooses_the_same_samples_again(job: Job) -> None:
    assert job.train("chosen", *SUBSET).iterations == [0, 1]
    run, arguments = job.root / "chosen-killed", job.arguments("chosen-killed", *SUBSET)
    ended = run_process(arguments, At("work training", 2), answer=job.root / "chosen.json")
    assert ended.exit_code == -signal.SIGKILL
    assert run_process(arguments, answer=job.root / "chosen.json").finished
    assert outcome(run) == outcome(job.root / "chosen")
    report = clean_audit(run, TWO_OF_FOUR)
    assert report.counts.trained == 2 * 2 * 2
    assert report.counts.train_dropped == {DropReason.NOT_CHOSEN: 2 * 2 * 2}
    require_best(run)
    rows = [row.values for row in read_metrics(run) if "choice/trained" in row.values]
    assert [(row["choice/trained"], row["choice/not_chosen"]) for row in rows] == [(4, 4)] * 2


def test_of_seeds_that_were_explored_a_part_is_trained(job: Job) -> None:
    overrides = (*SUBSET, "exploration={seeds_per_prompt: 8}")
    assert job.train("chosen-explored", *overrides).iterations == [0, 1]
    report = clean_audit(job.root / "chosen-explored", TWO_OF_FOUR)
    assert report.counts.trained == 2 * 2 * 2
    assert report.counts.train_dropped == {DropReason.NOT_CHOSEN: 2 * 2 * 2}
    require_best(job.root / "chosen-explored")
    rows = [
        row.values for row in read_metrics(job.root / "chosen-explored") if "choice/trained" in row.values
    ]
    assert [row["exploration/selection/pool_size"] for row in rows] == [8, 8]


@pytest.mark.slow
def test_two_ranks_choose_and_train_what_one_does(job: Job) -> None:
    overrides = [*SUBSET, "learner.learning_rate=0.001"]
    job.train("chosen-one", *overrides)
    ended = run_ranks(2, job.arguments("chosen-two", *overrides), answer=job.root / "chosen-two")
    assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * 2
    one, two = (clean_audit(job.root / name, TWO_OF_FOUR).counts for name in ("chosen-one", "chosen-two"))
    assert (one.trained, one.train_dropped) == (two.trained, two.train_dropped)
    assert largest_difference(job.root / "chosen-one", job.root / "chosen-two") <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_ray_with_overlap_a_killed_head_goes_on_and_the_best_are_trained(job: Job, ranks: int) -> None:
    run = job.root / f"chosen-ray-{ranks}"
    overlap = "pipeline={axis: prompt, baseline: group, trainers_generate: true, next_share: 0.5}"
    chooses = ("algorithm.train_samples=4", "algorithm.silent_groups=skip", "learner.micro_batch_size=2")
    arguments = job.arguments(run.name, *OVERLAPPED, overlap, *chooses, f"fleet.learner_ranks={ranks}")
    with running(run, arguments) as it:
        it.wait_for("SELECT 1 FROM samples JOIN rollouts ON id = rollout WHERE iteration = 1")
        it.kill_head()
    with running(run, arguments) as it:
        assert it.end(2 * PATIENCE_S) == 0, it.printed
        it.require_nothing_left()
    report = clean_audit(run, AuditLimits(group_size=6, staleness_max=1, train_samples=4))
    assert [bill.ended for bill in report.attempts] == [Ending.KILLED, Ending.FINISHED]
    assert report.counts.trained == 3 * 4 * 4
    assert report.counts.train_dropped[DropReason.NOT_CHOSEN] == 3 * 4 * 2
    require_best(run)
