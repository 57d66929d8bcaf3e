"""Models of published width with few blocks and random weights, to count and to time what a block costs.

The pipeline around the transformer is the family's tiny one, so of the transformer's configuration the widths
of text and latents are the tiny ones', too: no block sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.skeleton import filling, skeleton
from spotlight.models.slots import LoraSlots
from spotlight_files.pipeline_files import PipelineFiles

KINDS = ("num_layers", "num_single_layers", "n_layers")
"""Keys of configurations that count blocks of a kind."""
DUAL = "dual_attention_layers"
"""Blocks of SD3.5 with a second attention: a kind of their own, which this key lists."""
OF_THE_PIPELINE = {
    *("in_channels", "out_channels", "patch_size", "guidance_embeds", "joint_attention_dim", "text_dim"),
    *("text_embed_dim", "cap_feat_dim", "pooled_projection_dim", "context_in_dim"),
}
"""What a transformer takes from the pipeline around it."""
_SEED = 7


def depth_of(config: Mapping[str, Any]) -> dict[str, int]:
    """How many blocks of each kind a transformer's configuration has."""
    depth = {key: int(config[key]) for key in KINDS if key in config}
    if dual := config.get(DUAL):
        depth["num_layers"] -= len(dual)
        depth[DUAL] = len(dual)
    return {kind: number for kind, number in depth.items() if number}


def with_depth(config: Mapping[str, Any], depth: Mapping[str, int]) -> dict[str, Any]:
    """The same configuration with so many blocks of each kind, none of a kind that is not named."""
    changed = {**config, **{key: depth.get(key, 0) for key in KINDS if key in config}}
    if DUAL in config:
        dual = depth.get(DUAL, 0)
        changed |= {"num_layers": changed["num_layers"] + dual, DUAL: list(range(dual))}
    return changed


def in_pipeline(config: Mapping[str, Any], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """A transformer's configuration, fit for the pipeline of another transformer's."""
    return {key: value for key, value in config.items() if key not in OF_THE_PIPELINE} | {
        key: value for key, value in pipeline.items() if key in OF_THE_PIPELINE
    }


def random_blocks(
    kind: type[ModelFamily],
    files: PipelineFiles,
    depth: Mapping[str, int],
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_text_tokens: int = 512,
) -> ModelFamily:
    """A family whose transformer is that of ``files`` with ``depth`` blocks of each kind; of two, the first.

    Its sizes in pixels are those of ``files``; its VAE and text encoder, the tiny ones, do not fit them.

    Args:
        directory: for the tiny pipeline; does not exist yet.
    """
    kind.tiny(directory, _SEED)
    family = kind.load(
        directory,
        device=device,
        dtype=dtype,
        embeddings_cache=directory / "embeddings",
        max_text_tokens=max_text_tokens,
    )
    tiny: Any = denoisers(family.transformer)["transformer"]
    config = in_pipeline(with_depth(files.config("transformer"), depth), tiny.config)
    module = skeleton(type(tiny), config, dtype, device)
    with filling(module) as targets:
        draw(targets, _SEED)
    family.adapt(module)
    channels = family.dimensions.channels
    family.transformer, family.config = module, module.config
    family.dimensions = replace(kind.read_dimensions(files), channels=channels, layers=sum(depth.values()))
    return family


@torch.no_grad()
def draw(targets: Mapping[str, Tensor], seed: int) -> None:
    """Fill every tensor in place: matrices keep their inputs' scale, norms are 1, the rest is small."""
    device = next(iter(targets.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in targets.items():
        if tensor.ndim == 1 and "norm" in name and name.endswith("weight"):
            tensor.fill_(1.0)
        elif tensor.ndim == 2:
            tensor.normal_(0, 0.9 * tensor.shape[1] ** -0.5, generator=generator)
        else:
            tensor.normal_(0, 0.1, generator=generator)


def random_adapters(family: ModelFamily, rank: int, *, copies: bool = True) -> LoraSlots:
    """Adapters that already do something: with B = 0 the gradient of A would be 0.

    Args:
        copies: of a bfloat16 model, apply copies in its dtype, as the configuration has it.
    """
    spec = LoraSpec(rank, 2.0 * rank, family.lora_targets, seed=3)
    compute = family.dtype if copies and family.dtype != torch.float32 else None
    slots = LoraSlots(family.transformer, spec, compute=compute)
    generator = torch.Generator(family.device).manual_seed(5)
    with torch.no_grad():
        for name, parameter in slots.parameters("policy").items():
            if ".lora_B." in name:
                parameter.normal_(0, 0.02, generator=generator)
    return slots
