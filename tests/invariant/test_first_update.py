"""A batch's first update needs no old log-probs: its ratios are 1, and the pass would change no bit of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_world import World, algorithm, cut, first_update, gathered, make_learner, roll_out

from spotlight.algorithms.base import Slot
from spotlight.training.learner import TrainingSample

NAMES = ("flow-grpo", "flow-grpo-fast", "grpo-guard")
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"), layers=1)


def assert_no_bit_differs(
    world: World,
    name: str,
    size: int,
    mode: str = "lora",
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> None:
    params = {} if name == "grpo-guard" else {"kl_weight": 0.04}
    samples: list[TrainingSample] = []
    found = []
    for evaluated in (False, True):
        learner = make_learner(world, algorithm(name, **params), mode, dtype=dtype, **settings)
        samples = samples or roll_out(world, learner)
        found.append(first_update(learner, samples, size, evaluated=evaluated))
    (skipped, sums), (expected, sums_with_pass) = found
    assert skipped.keys() == expected.keys()
    assert all(torch.equal(skipped[parameter], gradient) for parameter, gradient in expected.items())
    assert sums == sums_with_pass
    assert sums.ratio_max == 1.0
    assert sums.means["ratio"] == 1.0
    assert sums.means["ratio_deviation"] == sums.means["approx_kl"] == sums.means["clip_fraction"] == 0.0


FIRST = {"flow-grpo": (2, "auto"), "flow-grpo-fast": (6, 2), "grpo-guard": (2, 1)}
"""By algorithm, samples of a micro-batch and timesteps of a pass in the first tier."""


@pytest.mark.parametrize(
    ("name", "size", "per_pass"),
    [
        pytest.param(name, size, per_pass, marks=() if (size, per_pass) == first else pytest.mark.slow)
        for name, first in FIRST.items()
        for size in (2, 6)
        for per_pass in (1, 2, "auto")
    ],
)
def test_without_the_pass_the_first_update_is_the_same_to_the_bit(
    world: World, name: str, size: int, per_pass: int | str
) -> None:
    assert_no_bit_differs(world, name, size, timesteps_per_pass=per_pass)


@pytest.mark.parametrize(
    "name", [NAMES[1], *(pytest.param(each, marks=pytest.mark.slow) for each in NAMES if each != NAMES[1])]
)
def test_so_it_is_with_all_weights_trained_recomputed_activations_and_half_precision(
    world: World, name: str
) -> None:
    assert_no_bit_differs(world, name, 3, "full", recompute="blocks")
    assert_no_bit_differs(world, name, 3, dtype=torch.bfloat16, autocast="bfloat16", recompute="blocks")


@pytest.mark.parametrize("name", NAMES)
def test_one_update_evaluates_each_timestep_once_and_two_the_second_ones_twice(
    world: World, name: str
) -> None:
    learner = make_learner(world, algorithm(name))
    samples = roll_out(world, learner)
    first, second = cut(samples, 3)
    timesteps = learner.algorithm.timesteps(learner_kept_steps(samples))
    with learner.slots.use("policy") as module:
        seen: list[bool] = []
        handle = module.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    learner.prepare(samples, [first, second])
    learner.accumulate(first, 3)
    assert seen == [True] * timesteps
    learner.step()
    learner.accumulate(second, 3)
    handle.remove()
    assert seen.count(True) == 2 * timesteps  # the losses
    assert seen.count(False) == timesteps  # old weights: of the second update's samples alone
    later = learner.step().sums
    assert later.ratio_max is not None
    assert later.ratio_max != 1.0


OLD = {
    "diffusion-nft": {"old_policy": {"cap": 0.0}, "reference_weight": 0.0},
    "awm": {"old_policy": {"slope": 0.0}, "reference_weight": 0.0},
    "dgpo": {"old_policy": {"cap": 0.0}},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [("diffusion-nft", "lora"), ("diffusion-nft", "full"), ("awm", "lora"), ("dgpo", "lora")],
)
def test_an_old_policy_that_is_the_policy_is_not_evaluated_and_no_bit_differs(
    world: World, name: str, mode: str
) -> None:
    found = []
    for evaluated in (False, True):
        learner = make_learner(world, algorithm(name, **OLD[name]), mode)
        samples = found[0][0] if found else roll_out(world, learner)
        seen: list[Slot] = []
        counted = partial(_counting, learner.slots.use, seen)
        learner.slots.use = counted  # type: ignore[method-assign]
        updates = []
        for batch in range(2):
            micro_batches = cut(samples, 2)
            learner.prepare([replace(each, version=learner.steps) for each in samples], micro_batches)
            for keys, update in zip(micro_batches, (1, 1, 2), strict=True):
                if evaluated:
                    learner.slots._equal.clear()
                learner.accumulate(keys, 4 if update == 1 else 2)
                if len(learner._waiting) in (2, 0):
                    updates.append((gathered(learner), learner.step().sums))
            if batch == 0:
                learner.finish_batch()
        found.append((samples, updates, seen))
    (_, skipped, few), (_, expected, many) = found
    for (gradients, sums), (their_gradients, their_sums) in zip(skipped, expected, strict=True):
        assert all(torch.equal(gradients[each], gradient) for each, gradient in their_gradients.items())
        assert sums == their_sums
    # Of a batch's three micro-batches at two timesteps, only that of the second update needs another forward.
    assert (few.count("old"), many.count("old")) == (4, 12)
    assert few.count("policy") == many.count("policy") == 12


def _counting(use: Any, seen: list[Slot], slot: Slot, **options: Any) -> Any:
    seen.append(slot)
    return use(slot, **options)


def learner_kept_steps(samples: Sequence[TrainingSample]) -> int:
    tensors = samples[0].tensors
    assert tensors is not None
    assert tensors.latents is not None
    return tensors.latents.shape[0] - 1
