"""Adapters applied as bfloat16 copies give what autocast gives, in every family: velocities and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.contract.family_cases import CASES, PROMPTS
from torch import Tensor

from spotlight.models.family import Guidance
from spotlight.models.slots import LoraSlots, LoraSpec, Slot
from spotlight.registry import FAMILIES

HALF = torch.bfloat16
LEVELS = torch.tensor([0.3, 0.9])
SLOTS: tuple[Slot, ...] = ("policy", "old", "reference")
KEPT = {"wan": 0.01, "wan-i2v": 0.01}
"""Of families with layers that diffusers keeps in float32, which autocast would compute in bfloat16: norm of
the difference over that of the value."""
FIRST = ("qwen-image", "flux", "sd3", "wan")
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in CASES]
)
def test_velocities_and_gradients_are_those_under_autocast(name: str, tmp_path: Path) -> None:
    FAMILIES.load(CASES[name].name).tiny(tmp_path / "pipeline", seed=0)
    under, copied = computed(name, tmp_path, None), computed(name, tmp_path, HALF)
    for expected, found in zip(under, copied, strict=True):
        assert expected.keys() == found.keys()
        apart = sum((found[key] - value).double().square().sum() for key, value in expected.items())
        length = sum(value.double().square().sum() for value in expected.values())
        assert apart <= KEPT.get(name, 0.0) ** 2 * length


def computed(name: str, root: Path, compute: torch.dtype | None) -> list[dict[str, Tensor]]:
    """Velocities by slot; the gradients that two backwards leave, by parameter."""
    case = CASES[name]
    family = FAMILIES.load(case.name).load(
        root / "pipeline",
        device="cpu",
        dtype=HALF,
        embeddings_cache=root / "embeddings",
        max_text_tokens=case.max_text_tokens,
    )
    spec = LoraSpec(rank=4, alpha=8.0, targets=family.lora_targets, seed=3)
    slots = LoraSlots(family.transformer, spec, ["old"], compute=compute)
    generator = torch.Generator().manual_seed(1)
    for slot in ("policy", "old"):
        random = {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in slots.state(slot).items()}
        slots.load_state(slot, random)
    latents = torch.randn(2, *family.latent_shape(case.size), generator=torch.Generator().manual_seed(2))
    condition = family.collate(family.encode(case.inputs(PROMPTS)))
    guidance = Guidance(1.0, None, family.embedded_guidance)

    def velocity(slot: Slot) -> Tensor:
        with torch.autocast("cpu", HALF, enabled=compute is None), slots.use(slot) as model:
            return family.velocity(model, latents, LEVELS, condition, guidance, case.size)

    with torch.no_grad():
        found: dict[str, Tensor] = {slot: velocity(slot) for slot in SLOTS}
    assert all(bool(tensor.any()) for tensor in found.values())
    for _ in range(2):
        velocity("policy").square().sum().backward()
    gradients = {n: p.grad for n, p in slots.trainable_parameters().items() if p.grad is not None}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert any(bool(gradient.any()) for gradient in gradients.values())
    return [found, gradients]
