"""What one GPU of 24 GB and less can train, by the memory plan of published models."""

from __future__ import annotations

import pytest

from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig
from spotlight.dry_run.fitting_sizes import USABLE
from spotlight.dry_run.memory_plan import Phase, memory_parts, phase_bytes
from spotlight.dry_run.model_plan import ModelSizes, family_of, read_sizes
from spotlight.dry_run.run_plan import parameters_trained

GIB = 2**30
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


def peaks(config: RunConfig) -> dict[Phase, float]:
    model = read_sizes(config)
    assert isinstance(model, ModelSizes)
    trained = parameters_trained(config, model)
    return phase_bytes(memory_parts(config, model, family_of(config), trained, TEXT_TOKENS))


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
