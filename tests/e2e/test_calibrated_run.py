"""``spotlight calibrate`` and ``simulate --as`` on real runs: two seeds on a local Ray, one loses a node.

Slots take their time asleep (``benchmarks/_paced``), as GPUs of one's own would: slots that compute on shared
cores slow each other down, and whatever else runs there slows all of them, which no simulator can know.
"""

from __future__ import annotations

import pytest
from benchmarks._pipeline_ray import paced_environment
from main_job import Job
from ray_job import running

from spotlight.report.record import read_run
from spotlight.runtime.assembly.controller_plan import cluster_plan_of
from spotlight.store.metrics import is_validation, read_metrics
from spotlight.store.run_estimate import SpentSoFar, estimated, measured_pace
from spotlight_plan.calibration.measured_profile import measured_profile
from spotlight_plan.calibration.run_prediction import predict_run
from spotlight_plan.calibration.run_times import RunTimes, read_run_times

pytestmark = [pytest.mark.timeout(2000), pytest.mark.slow]  # two runs on Ray, which sleep

BOUND = 0.05
"""Of an iteration's time."""
TRACE = """# spotlight trace horizon_s=600.0
time_s,event,node,gpus
0.0,add,spot-1,1
0.1,add,spot-2,1
70.0,remove,spot-1,1
80.0,add,spot-3,1
"""
SETTINGS = (
    "algorithm.name=diffusion-nft",
    "algorithm.train_timesteps=2",
    "fleet.driver=ray",
    "fleet.drain_margin_s=2",
    "iterations=8",
    "rollout.steps=4",
    "rollout.prompts_per_iteration=3",
    "rollout.group_size=4",
    "rollout.batch_size=4",
    "learner.micro_batch_size=4",
    "evaluation.every=4",
    "evaluation.prompts=4",
    "evaluation.images_per_prompt=2",
    "evaluation.steps=4",
)
PACE = {"SPOTLIGHT_PACED_STEP_S": "0.125", "SPOTLIGHT_PACED_TRAIN_S": "0.5"}
"""A batch of 4 takes 2 s, training on 12 samples 6 s."""


@pytest.fixture(scope="module")
def runs(job: Job) -> list[RunTimes]:
    trace = job.root / "calibrated.csv"
    trace.write_text(TRACE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (paced_environment() | PACE).items():
            patch.setenv(name, value)
        for seed in (0, 1):
            name = f"calibrated-{seed}"
            nodes = (f"fleet.spot.trace={trace}",) if seed else ("fleet.spot.nodes=2",)
            arguments = job.arguments(name, *SETTINGS, *nodes, f"run_seed={seed}")
            with running(job.root / name, arguments) as run:
                assert run.end(patience_s=900) == 0, run.printed
    return [read_run_times(job.root / f"calibrated-{seed}") for seed in (0, 1)]


def test_a_run_takes_what_the_simulator_predicts(runs: list[RunTimes]) -> None:
    for run in runs:
        predicted = predict_run(run, cluster_plan_of(run.config), measured_profile([run]))
        comparison = f"{run.label}: predicted {predicted.iteration_s:.2f} s, measured {run.iteration_s:.2f} s"
        print(comparison, f"{predicted.deviation(run):+.1%}")
        assert predicted.error is None, comparison
        assert abs(predicted.deviation(run)) < BOUND, comparison


def test_a_run_is_estimated_by_the_figures_of_another_and_corrected_by_its_own(
    runs: list[RunTimes], job: Job
) -> None:
    record = read_run(job.root / "calibrated-1")
    said = record.estimate
    assert said is not None
    assert "calibration: the figures of the run calibrated-0" in said.rests_on
    assert said.work_s.likely == pytest.approx(record.wall_s, rel=0.2)  # of another fleet, which loses a node
    rows = read_metrics(record.paths.path)
    third = next(at for at, row in enumerate(rows) if row.iteration == 2 and not is_validation(row))
    early = SpentSoFar(3, 1, rows[third].wall_s, record.history.cost_usd * rows[third].wall_s / record.wall_s)
    pace = measured_pace(rows[: third + 1], 0, early, record.history.gpu_seconds_by_phase)
    assert pace is not None
    corrected = estimated(pace, early, said.iterations, said.evaluations)
    print(f"{record.wall_s:.1f} s; estimated {said.work_s}, after three iterations {corrected.work_s}")
    assert corrected.work_s.likely == pytest.approx(record.wall_s, rel=0.2)
