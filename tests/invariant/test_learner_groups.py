"""Losses that compare a group, and groups that share their draws, on a real DiT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_world import World, algorithm, cut, gradients, make_learner, roll_out

NEWER = ("flow-dppo", "v-grpo", "dgpo", "diffusion-dpo")
PARAMS: dict[str, dict[str, Any]] = {"diffusion-dpo": {"beta": 5.0}}
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"), layers=1)


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("name", NEWER)
def test_micro_batches_of_whole_groups_and_passes_change_nothing(world: World, name: str, mode: str) -> None:
    found = []
    samples = []
    for size, per_pass in ((6, 1), (2, 2)):
        learner = make_learner(
            world, algorithm(name, **PARAMS.get(name, {})), mode, timesteps_per_pass=per_pass
        )
        samples = samples or roll_out(world, learner)
        found.append(gradients(learner, samples, size))
    learner.step()
    whole, pieces = found
    assert any(gradient.any() for gradient in whole.values())
    for parameter, gradient in whole.items():
        torch.testing.assert_close(
            pieces[parameter], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-9
        )


@pytest.mark.parametrize("name", NEWER)
def test_later_updates_of_a_batch_train(world: World, name: str) -> None:
    learner = make_learner(world, algorithm(name, **PARAMS.get(name, {})), timesteps_per_pass=2)
    samples = roll_out(world, learner)
    parts = cut(samples, 2)
    learner.prepare(samples, parts)
    ratios = []
    for keys in parts:
        learner.accumulate(keys, 2)
        ratios.append(learner.step().sums.means.get("ratio"))
    learner.finish_batch()
    assert learner.steps == 3
    if name != "diffusion-dpo":
        assert ratios[0] == 1.0
        assert ratios[1] != 1.0


def test_a_cut_group_is_refused_and_its_samples_share_their_draws(world: World) -> None:
    learner = make_learner(world, algorithm("dgpo"))
    samples = roll_out(world, learner)
    keys = [sample.key for sample in samples]
    learner.prepare(samples, [keys])
    batch = learner._bind(learner._mine(keys), keys).batch
    assert batch.seeds == (0, 0, 10, 10, 20, 20)
    with pytest.raises(ValueError, match="1 of the 2 samples of group"):
        learner.accumulate(keys[:3], 6)
