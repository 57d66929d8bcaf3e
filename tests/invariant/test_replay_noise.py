"""How far rounding moves replayed log-probs from the rollouts' with switches that change kernels or batches.

In float32 the difference stays below a hundredth of the smallest clip range of a recipe, 1e-5. bfloat16
rounds more than that whatever the switch, which a run says after its first iteration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.captured import record
from learner_world import World, algorithm, make_learner, roll_out, train_batch

from spotlight.models.kernels.attention import use_attention
from spotlight.models.kernels.cuda_graphs import capture_forwards
from spotlight.models.kernels.regional import compile_blocks
from spotlight.training.learner import Learner

CLIP_RANGE = 1e-5
CPU = torch.device("cpu")
SWITCHES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "attention": {},
    "captured forwards": {},
    "every block recomputed": {"recompute": "blocks"},
    "every second block recomputed": {"recompute": 2},
    "timesteps of a pass": {"timesteps_per_pass": 4},
}

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"))


def switched(world: World, switch: str, **settings: Any) -> Learner:
    learner = make_learner(world, algorithm("flow-grpo"), **SWITCHES[switch], **settings)
    if switch == "attention":
        use_attention(learner.family.transformer, "math", CPU)
    if switch == "captured forwards":
        capture_forwards(learner.slots, CPU, record)
    return learner


def noise(world: World, learner: Learner) -> float:
    """The largest difference of a step's log-probs, rolled out by fours and replayed by twos."""
    samples = roll_out(world, learner, batch=4, autocast=learner.autocast)
    report = train_batch(learner, samples, 2).flat()
    steps = [value for name, value in report.items() if name.startswith("replay/")]
    assert steps
    return max(steps)


@pytest.mark.parametrize("switch", SWITCHES)
def test_float32_replays_within_a_hundredth_of_the_clip_range(world: World, switch: str) -> None:
    assert noise(world, switched(world, switch)) <= CLIP_RANGE / 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_blocks_replay_as_well(random_pipeline: Path, tmp_path: Path) -> None:
    world = World(random_pipeline, tmp_path / "cache", layers=1)
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    learner = switched(world, "nothing")
    try:
        compile_blocks(learner.family.transformer, CPU, "aot_eager")
        assert noise(world, learner) <= CLIP_RANGE / 100
    finally:
        torch._dynamo.config.recompile_limit = limit
        torch._dynamo.reset()


def test_bfloat16_rounds_more_than_that_and_switches_add_nothing(world: World) -> None:
    half = {"dtype": torch.bfloat16, "autocast": "bfloat16"}
    plain, recomputed, attention = (
        noise(world, switched(world, switch, **half))
        for switch in ("nothing", "every second block recomputed", "attention")
    )
    assert plain > CLIP_RANGE / 100, "the warning after the first iteration is for this"
    assert recomputed == plain
    assert attention <= 2 * plain
