"""Every family loads, draws and trains on a simulated GPU, with equal bits, and nothing left on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.family_cases import CASES, TRAINED
from tests.invariant import learner_world
from tests.simulated_gpu import GpuTensor, MixedDevicesError, simulated_gpu
from torch import nn

from spotlight.models.family import ModelFamily
from spotlight.registry import FAMILIES
from spotlight.testing.family_contract import FamilyCase, draw

TRAININGS = (("flow-grpo-fast", "lora"), ("diffusion-nft", "full"))
FIRST = (("qwen-image", 0), ("wan", 2))
"""One transformer, and two."""


def load(case: FamilyCase, directory: Path, device: str) -> ModelFamily:
    return FAMILIES.load(case.name).load(
        directory / "pipeline",
        device=device,
        dtype=torch.float32,
        embeddings_cache=directory / device,
        max_text_tokens=case.max_text_tokens,
    )


def trained(case: FamilyCase, family: ModelFamily, algorithm: str, mode: str) -> Mapping[str, torch.Tensor]:
    """The policy after an update on rollouts of its own."""
    world = learner_world.FamilyWorld(family, case.size, case.inputs)
    learner = learner_world.make_learner(
        world, learner_world.algorithm(algorithm), mode, guidance=2.0, timesteps_per_pass=2, ema_cap=0.5
    )
    samples = learner_world.roll_out(world, learner, guidance=2.0, batch=6)
    learner_world.train_batch(learner, samples, 3)
    state = learner.slots.state("policy")
    assert {tensor.device.type for tensor in state.values()} == {family.device.type}
    return {name: tensor.cpu() for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("name", "variant"),
    [pytest.param(*each, marks=() if each in FIRST else pytest.mark.slow) for each in TRAINED],
)
def test_a_family_computes_on_a_gpu_what_it_computes_on_the_cpu(
    name: str, variant: int, tmp_path: Path
) -> None:
    case = CASES[name]
    FAMILIES.load(name).tiny(tmp_path / "pipeline", seed=variant, variant=variant)
    family = load(case, tmp_path, "cpu")
    picture = draw(family, case, case.settings[-1])[1]
    weights = [trained(case, family, *each) for each in TRAININGS]
    with simulated_gpu():
        family = load(case, tmp_path, "cuda")
        assert np.array_equal(draw(family, case, case.settings[-1])[1], picture)
        for training, wanted in zip(TRAININGS, weights, strict=True):
            found = trained(case, family, *training)
            assert [key for key in wanted if not torch.equal(wanted[key], found[key])] == []


def test_the_simulated_gpu_keeps_tensors_of_the_cpu_apart() -> None:
    with simulated_gpu():
        layer = nn.Linear(4, 4).to("cuda")
        x = torch.randn(3, 4, device="cuda")
        layer(x).square().sum().backward()
        assert isinstance(layer.weight.grad, GpuTensor)
        for mixed in (
            lambda: layer(torch.randn(3, 4)),
            lambda: torch.ones(3) + x.sum(),
            lambda: torch.cat([x, torch.ones(1, 4)]),
            lambda: torch.ones(4)[x.argmax(1)],
        ):
            with pytest.raises(MixedDevicesError):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        assert x.cpu().device.type == torch.empty_like(x, device="cpu").device.type == "cpu"
        assert x.view(12).zero_().sum() == x.abs().sum() == 0
    assert not torch.cuda.is_available()
