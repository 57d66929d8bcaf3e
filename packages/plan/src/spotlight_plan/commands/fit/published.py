"""Which published models one GPU can train, at usual settings: for ``spotlight doctor`` and the README."""

from __future__ import annotations

from collections.abc import Iterator

from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig
from spotlight.dry_run.fitting import Needs
from spotlight.dry_run.model_plan import ModelSizes, bind_targets, lora_parameters, planned_files, read_sizes
from spotlight.dry_run.reward_plan import reward_places
from spotlight.registry import FAMILIES
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles
from spotlight_plan.commands.fit.fit import Fit, fit
from spotlight_plan.commands.gpu.asked_model import SIDE_PX, WORDS

RANK = 32
VIDEO = 480, 832, 33
"""Height, width and frames."""
_GUIDANCE = 4.0


def usual(family: str, path: str) -> RunConfig:
    """Adapters of rank 32 on a published model in bfloat16: Flow-GRPO-Fast with guidance, and of models that
    are distilled, so that they take none, DiffusionNFT.
    """
    kind = FAMILIES.load(family)
    height, width, frames = VIDEO if kind.video else (SIDE_PX, SIDE_PX, 1)
    rollout = {"height": height, "width": width, "frames": frames, "batch_size": 1 if kind.video else 4}
    tree = {
        "model": {"family": family, "path": path, "dtype": "bfloat16"},
        "data": {"train": "testbed", "test": "testbed"},
        "rollout": {**rollout, "steps": 4},
        "rewards": [{"name": "jpeg_size", "device": "cpu"}],
        "learner": {"lora": {"rank": RANK}, "autocast": "bfloat16", "micro_batch_size": 4},
    }
    distilled = build_config(dict(tree), f"the usual one of {path}")
    if not _guided(distilled):
        return distilled
    window = {"kind": "random", "size": 1, "low": 1, "high": 4}
    tree["rollout"] = {
        **rollout,
        "steps": 10,
        "true_cfg_scale": _GUIDANCE,
        "sampler": "flow-sde",
        "sde_window": window,
    }
    return build_config({**tree, "algorithm": {"name": "flow-grpo-fast"}}, f"the usual one of {path}")


def _guided(config: RunConfig) -> bool:
    family, files = FAMILIES.load(config.model.family), planned_files(config)
    if family.embedded_guidance is not None or not isinstance(files, PipelineFiles):
        return False
    try:
        family.check_guidance(files, _GUIDANCE)
    except ModelError:
        return False
    return True


def usual_needs(config: RunConfig) -> Needs:
    """Of a run of :func:`usual`."""
    family, model = FAMILIES.load(config.model.family), read_sizes(config)
    if not isinstance(model, ModelSizes):
        raise ModelError(f"model.path={config.model.path} has no published sizes; expected a published model")
    trained = lora_parameters(bind_targets(model, family.lora_targets), RANK)
    tokens = family.planned_text_tokens(WORDS, config.model.max_text_tokens) + family.reference_tokens
    return Needs(model, trained, tokens, reward_places(config))


def published_fits(usable_bytes: float) -> Iterator[tuple[str, Fit]]:
    """What a GPU with so much memory takes, by hub id, of all published models.

    Two families may train one model (Wan's 5B, by text or by a first frame): the first stands for it.
    """
    family_of: dict[str, str] = {}
    for name in FAMILIES.built_in:
        for path in FAMILIES.load(name).published:
            family_of.setdefault(path, name)
    for path, name in family_of.items():
        config = usual(name, path)
        yield path, fit(config, usual_needs(config).memory, usable_bytes)


def trained(usable_bytes: float) -> list[str]:
    """Published models that fit, those with whole weights first, others with what holds their base."""
    fitting = [
        (path, found.config.model.quantize) for path, found in published_fits(usable_bytes) if found.fits
    ]
    whole = [path for path, quantize in fitting if quantize == "none"]
    return [*whole, *(f"{path} ({quantize})" for path, quantize in fitting if quantize != "none")]
