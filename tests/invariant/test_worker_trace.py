"""A worker's training rollouts are traced, and nothing else of what it does."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

from worker_world import Body, grant, home_with_prompts, loop, ready, rollout, turns, work_off

from spotlight.scheduler.effects import StopGroup
from spotlight.scheduler.types import Phase, Purpose, WorkerId
from spotlight_kernels.measure.step_profile import StepProfiler

STEPS = 4
W0 = WorkerId("w0")


def test_a_trace_is_of_training_rollouts_and_ends_with_them(random_pipeline: Path, tmp_path: Path) -> None:
    body = Body.build(random_pipeline, tmp_path)
    home = home_with_prompts(body.family)
    worker, _ = loop(body, home)
    taken: list[list[str]] = []
    notes: list[str] = []

    def take(path: Path) -> None:
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        taken.append([event["name"] for event in events if event["name"].endswith(" step")])

    profiler = StepProfiler(None, (Phase.ROLLOUT,), 10, notes.append, take)
    worker._dependencies = dataclasses.replace(
        worker._dependencies, around=profiler.step, rested=profiler.close
    )
    ready(worker, home)
    worker.commands.put(grant(1, [rollout(3, STEPS, Purpose.EVAL)]))
    work_off(worker)
    assert not taken
    worker.commands.put(grant(2, [rollout(1, STEPS), rollout(2, STEPS)]))
    work_off(worker)
    assert taken == [["rollout step"] * (STEPS - 1)], notes
    worker.commands.put(StopGroup(W0, 1, (W0,)))
    turns(worker, 1)
    assert len(taken) == 1
