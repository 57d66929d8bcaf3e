"""What one GPU of 24 GB and less can train, by the memory plan of published models."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from scripts import small_gpus_table
from scripts.marked_part import read_part

from spotlight.cli import doctor_checks
from spotlight.cli.doctor import Verdict
from spotlight.config.load import build_config, load_config
from spotlight.config.schema import RunConfig
from spotlight.dry_run.fitting import Needs
from spotlight.dry_run.fitting_sizes import USABLE
from spotlight.dry_run.memory_plan import Phase, peak_bytes, phase_bytes
from spotlight.dry_run.model_plan import ModelSizes, read_sizes
from spotlight.dry_run.reward_plan import reward_parts, reward_places
from spotlight.dry_run.run_plan import make_plan, parameters_trained
from spotlight.registry import FAMILIES
from spotlight_plan.commands.fit import published
from spotlight_plan.commands.fit.fit_option import small_fits

ROOT = Path(__file__).parents[2]
GIB = 2**30
SMALL_RECIPES = sorted((ROOT / "examples").glob("[0-9]*gb-*.yaml"))
TEXT_TOKENS = 64


def small_run(family: str, path: str, **changes: dict[str, object]) -> RunConfig:
    """At 512 px in bfloat16, with adapters of rank 32, guidance, micro-batch 1 and a rollout batch of 4."""
    distilled = family == "flux2-klein"
    sections: dict[str, dict[str, object]] = {
        "model": {"family": family, "path": path, "dtype": "bfloat16"},
        "data": {"train": "testbed", "test": "testbed"},
        "algorithm": {"name": "diffusion-nft" if distilled else "flow-grpo-fast"},
        "rollout": {
            "height": 512,
            "width": 512,
            "steps": 4 if distilled else 10,
            "batch_size": 4,
            "true_cfg_scale": 1.0 if distilled else 4.0,
            **(
                {}
                if distilled
                else {"sampler": "flow-sde", "sde_window": {"kind": "random", "size": 1, "low": 1, "high": 4}}
            ),
        },
        "learner": {
            "lora": {"rank": 32},
            "autocast": "bfloat16",
            "recompute": "blocks",
            "micro_batch_size": 1,
        },
    }
    for name, change in changes.items():
        sections[name] = {**sections.get(name, {}), **change}
    return build_config(dict(sections), "the test")


def needs(config: RunConfig) -> Needs:
    model = read_sizes(config)
    assert isinstance(model, ModelSizes)
    trained = parameters_trained(config, model)
    return Needs(model, trained, TEXT_TOKENS, reward_places(config))


def peaks(config: RunConfig) -> dict[Phase, float]:
    return phase_bytes(needs(config).memory(config))


@pytest.mark.parametrize(
    ("family", "path", "most"),
    [
        ("z-image", "Tongyi-MAI/Z-Image", 14.2),
        ("flux2-klein", "black-forest-labs/FLUX.2-klein-4B", 9.2),
        ("flux2-klein", "black-forest-labs/FLUX.2-klein-9B", 19.5),
        ("sd3", "stabilityai/stable-diffusion-3.5-large", 16.9),
        ("qwen-image-2.1", "Qwen/Qwen-Image-2.1", 18.7),
    ],
)
def test_models_of_up_to_nine_billion_parameters_train_on_24_gb(family: str, path: str, most: float) -> None:
    found = peaks(small_run(family, path))
    assert max(found.values()) < most * GIB < USABLE * 24 * GIB


@pytest.mark.slow
def test_the_readme_says_what_small_gpus_train() -> None:
    shown = read_part(small_gpus_table.PAGE, small_gpus_table.MARK)
    assert shown == small_gpus_table.table(), "run python -m scripts.small_gpus_table"


def test_the_doctor_names_what_a_gpu_can_train(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: FAMILIES.built_in[name] for name in ("sd3", "z-image")}
    monkeypatch.setattr(FAMILIES, "built_in", few)
    sixteen, one = (doctor_checks.trains(gib * GIB) for gib in (16, 1))
    assert sixteen.verdict is Verdict.OK
    assert "a LoRA of stabilityai/stable-diffusion-3.5-medium, Tongyi-MAI/Z-Image, " in sixteen.found
    assert "3.5-large (int8): " in sixteen.found
    assert "--fit auto" in sixteen.found
    assert one.verdict is Verdict.WARN
    assert "no published model" in one.found


def test_a_model_that_two_families_train_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "usual", lambda name, path: name)
    monkeypatch.setattr(published, "usual_needs", lambda config: SimpleNamespace(memory=()))
    monkeypatch.setattr(published, "fit", lambda config, *_: config)
    found = list(published.published_fits(0.0))
    assert len(found) == len(dict(found))
    assert dict(found)["Wan-AI/Wan2.2-TI2V-5B-Diffusers"] == "wan"


@pytest.mark.parametrize("recipe", SMALL_RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_gpu_of_its_name_with_its_rewards_on_the_cpu(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(recipe)
    gib = int(recipe.stem.partition("gb-")[0])
    plan = make_plan(config)
    assert peak_bytes(plan.memory) <= USABLE * gib * GIB
    assert not [part for part in plan.memory if part.part.startswith("reward ")]
    assert plan.needs is not None
    found = dict(small_fits(config, plan.needs))[gib]
    assert not found.changes
    assert "Estimated" in recipe.read_text(encoding="utf-8").partition("Sources of the figures")[0]


def test_a_reward_on_the_same_gpu_is_in_the_plan_until_it_is_on_the_cpu(tmp_path: Path) -> None:
    """Unknown weights are only known to fit nowhere."""
    weights = tmp_path / "model.safetensors"
    save_file({"weight": np.zeros((1000,), np.float32)}, weights)
    known, unknown = (
        {"name": "clip-score", "params": {"model": str(each)}} for each in (tmp_path, "no/such")
    )

    def beside(reward: dict[str, object], **place: str) -> list[float]:
        run = build_config(
            {"data": {"train": "testbed", "test": "testbed"}, "rewards": [reward | place]}, "it"
        )
        return [part.bytes for part in reward_parts(run, reward_places(run), unknown_bytes=math.inf)]

    assert beside(known, device="auto") == [4000 + 0.4 * GIB] == beside(known, device="learner")
    assert beside(unknown, device="auto") == [math.inf]
    assert beside(known, device="cpu") == beside(unknown, device="cpu") == []
    assert beside({"name": "jpeg_size"}) == []
