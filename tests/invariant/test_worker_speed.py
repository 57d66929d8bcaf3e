"""Workers tell how fast they make training rollouts, in the report that says they are done."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
from worker_ranks import Ranks
from worker_world import (
    PROMPTS,
    SIZE,
    Body,
    MemoryHome,
    grant,
    home_with_prompts,
    loop,
    ready,
    rollout,
    work_off,
)

from spotlight.scheduler.events import LeaseCompleted
from spotlight.scheduler.types import Purpose

STEPS = 4
PAIR = [rollout(seed, STEPS) for seed in (1, 2)]


@pytest.fixture
def body(random_pipeline: Path, tmp_path: Path) -> Body:
    return Body.build(random_pipeline, tmp_path)


@pytest.fixture
def home(body: Body) -> MemoryHome:
    return home_with_prompts(body.family)


def tokens_of_pair(body: Body) -> int:
    texts = [condition.tokens for condition in body.family.encode(PROMPTS)]
    return STEPS * sum(body.family.dimensions.tokens(SIZE) + texts[each.seed] for each in PAIR)


def test_speed_is_of_training_rollouts_alone(body: Body, home: MemoryHome) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    began = time.perf_counter()
    worker.commands.put(grant(1, [rollout(1, STEPS, Purpose.EVAL)]))
    work_off(worker)
    assert home.of(LeaseCompleted)
    assert not home.speeds
    worker.commands.put(grant(2, PAIR))
    work_off(worker)
    (speed,) = home.speeds
    (report,) = [report for report in home.reports if speed in report.events]
    assert any(isinstance(event, LeaseCompleted) for event in report.events)
    assert speed.tokens == tokens_of_pair(body)
    assert speed.flops is speed.peak_flop_s is None, "on a CPU"
    assert 0 < speed.seconds < time.perf_counter() - began
    worker.commands.put(grant(3, PAIR[:1]))
    work_off(worker)
    assert len(home.speeds) == 2
    assert home.speeds[1].tokens < speed.tokens, "counted once"


def test_steps_shared_with_other_rollouts_do_not_count(body: Body, home: MemoryHome) -> None:
    worker, _ = loop(body, home)
    ready(worker, home)
    worker.commands.put(grant(1, PAIR))
    worker.commands.put(grant(2, [rollout(1, 2, Purpose.EVAL)]))
    work_off(worker)
    (speed,) = home.speeds
    assert speed.tokens == tokens_of_pair(body) * (STEPS - 2) / STEPS


def test_a_group_tells_once_and_of_one_devices_share(
    body: Body, home: MemoryHome, random_pipeline: Path, tmp_path: Path
) -> None:
    with closing(Ranks(random_pipeline, tmp_path, home)) as ranks:
        ranks.spawn("w0", "w1")
        ranks.form("w0", "w1")
        ranks.grant(PAIR)
        ranks.until(lambda: home.of(LeaseCompleted))
    (speed,) = home.speeds
    assert speed.tokens == tokens_of_pair(body) / 2
