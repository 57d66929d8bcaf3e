"""Previews that reuse blocks, for every family that says it can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.contract.family_cases import CASES, PROMPTS, TRAINED

from spotlight.diffusion.samplers import ODE
from spotlight.registry import FAMILIES
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout, Recipe
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import PromptId

STEPS = 6
TWO_TRANSFORMERS = (("wan", 2), ("wan-i2v", 2))
"""Whose previews with a step cache are refused with the configuration (tests/unit/test_model_checks.py)."""
REUSING = [each for each in TRAINED if FAMILIES.load(each[0]).reuses_blocks and each not in TWO_TRANSFORMERS]


@pytest.mark.parametrize(
    ("name", "variant"),
    [each if each == ("wan", 3) else pytest.param(*each, marks=pytest.mark.slow) for each in REUSING],
)
def test_previews_reuse_blocks_and_come_near(tmp_path: Path, name: str, variant: int) -> None:
    kind, case = FAMILIES.load(name), CASES[name]
    kind.tiny(tmp_path / "pipeline", seed=variant, variant=variant)
    family = kind.load(
        tmp_path / "pipeline",
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=tmp_path / "embeddings",
        max_text_tokens=case.max_text_tokens,
    )
    engine = Engine(family, max_batch=8, negative=family.encode([" "])[0])
    plain = Recipe(case.size, ODE(), None, 2.0, "final", family.embedded_guidance)
    found = {}
    for reused in (1, 2, 3):
        recipe = plain.preview(STEPS, step_cache=reused)
        rollouts = [
            Rollout(RolloutId(f"r{i}"), Purpose.EXPLORE, 0, PromptId(f"p{i}"), 0, i, STEPS, PolicyVersion(0))
            for i in range(len(PROMPTS))
        ]
        states = engine.start(rollouts, family.encode(case.inputs(PROMPTS, " ", case.size)), recipe)
        results = engine.run(family.transformer, states)
        finals = [each.tensors.final for each in results if isinstance(each, FinishedRollout)]
        found[reused] = torch.stack(finals)
    assert found[1].std() > 0.1
    for reused in (2, 3):
        error = (found[reused] - found[1]).square().mean().sqrt() / found[1].std()
        assert 1e-4 < error < 0.5, reused  # blocks were reused, and it is no other sample
