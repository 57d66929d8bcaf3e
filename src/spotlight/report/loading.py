"""Python snippets that load a run's weights in plain diffusers, with the real paths."""

from __future__ import annotations

from pathlib import Path

from spotlight.config.schema import RunConfig
from spotlight.registry import FAMILIES
from spotlight.testbed import TESTBEDS
from spotlight_rewards.base.files import at_home

SECOND_TRANSFORMER = "transformer_2"
"""Folder of the second transformer's weights, where a pipeline has two (Wan2.2-A14B)."""
_EXAMPLE_PROMPT = "two red circles"
_EXAMPLE_REFERENCE = "picture-to-edit.png"


def base_model(config: RunConfig) -> str:
    """Directory (absolute) or hub id of the pipeline that was trained."""
    if config.model.path in TESTBEDS:
        return str(TESTBEDS[config.model.path].pipeline)
    local = Path(config.model.path)
    return str(local.resolve()) if local.is_dir() else config.model.path


def whole_base_note(config: RunConfig) -> str:
    """Of a LoRA that was trained beside a base in few bits: that it is loaded beside a whole one."""
    if config.model.quantize == "none":
        return ""
    return (
        f"It was trained and scored with the base in {config.model.quantize.upper()}; here it is used with "
        f"the files' own weights. `spotlight eval {config.name} --quantize none` shows its scores with those."
    )


def loading_snippet(
    config: RunConfig,
    weights: Path,
    *,
    prompt: str | None = None,
    merged: bool | None = None,
    dtype: str | None = None,
) -> str:
    """Python that generates an image with the trained weights, without Spotlight.

    Args:
        weights: the LoRA's file or folder, or a merged pipeline's folder.
        prompt: of the picture; None, as of a run that made none: the testbed's example, or that of any model.
        merged: default: true for a full fine-tune.
        dtype: of the merged files; default: ``model.dtype``.
    """
    lora = config.learner.mode == "lora" if merged is None else not merged
    family = FAMILIES.load(config.model.family)
    pipeline = family.pipeline_class
    source = base_model(config) if lora else str(weights)
    loaded = [repr(source)]
    if config.model.revision is not None and lora:
        loaded.append(f"revision={config.model.revision!r}")
    imports = [f"from diffusers import {pipeline}"]
    if (dtype or config.model.dtype) == "bfloat16":
        imports.insert(0, "import torch")
        loaded.append("torch_dtype=torch.bfloat16")
    if family.video:
        imports.append("from diffusers.utils import export_to_video")
    if family.references_max:
        imports.append("from diffusers.utils import load_image")
    lines = [*imports, f"pipe = {pipeline}.from_pretrained({', '.join(loaded)})"]
    lines += family.loading_lines(config.rollout.true_cfg_scale, config.model.max_text_tokens)
    if lora and config.model.transformer is not None:
        lines += _transformer(config.model.transformer)
    if lora:
        lines.append(_lora(weights, by_pipeline=family.loads_lora))
        second = (weights if weights.is_dir() else weights.parent) / SECOND_TRANSFORMER
        if second.is_dir():
            lines.append(f"pipe.load_lora_weights({str(second)!r}, load_into_transformer_2=True)")
    made = f"pipe({', '.join(_call(config, prompt))})"
    if family.video:
        lines.append(f"export_to_video({made}.frames[0], 'video.mp4', fps={config.rollout.fps:g})")
    else:
        lines.append(f"{made}.images[0].save('picture.png')")
    return "\n".join(lines)


def _lora(weights: Path, *, by_pipeline: bool) -> str:
    if by_pipeline:
        return f"pipe.load_lora_weights({str(weights)!r})"
    return f"pipe.transformer.load_lora_adapter({str(weights)!r}, use_safetensors=True)"


def _call(config: RunConfig, prompt: str | None) -> list[str]:
    """Arguments that draw one picture as the run evaluates it, as Python."""
    family, rollout = FAMILIES.load(config.model.family), config.rollout
    if prompt is None:
        prompt = TESTBEDS[config.model.path].example if config.model.path in TESTBEDS else _EXAMPLE_PROMPT
    embedded = family.embedded_guidance if rollout.embedded_guidance is None else rollout.embedded_guidance
    guidance = family.call_arguments(rollout.true_cfg_scale, embedded)
    size = family.size_arguments(rollout.height, rollout.width, rollout.frames)
    picture = f"load_image({_EXAMPLE_REFERENCE!r})"
    shown = picture if family.references_max == 1 else f"[{picture}]"
    call = [
        *([f"image={shown}"] if family.references_max else []),
        f"prompt={prompt!r}",
        *(f"{name}={value!r}" for name, value in size.items()),
        f"num_inference_steps={config.evaluation.steps}",
        *([f"max_sequence_length={config.model.max_text_tokens}"] if family.cuts_prompts else []),
        *(f"{name}={value!r}" for name, value in guidance.items()),
    ]
    if rollout.true_cfg_scale > 1:
        call.append(family.negative_argument(rollout.negative_prompt))
    return call


def _transformer(source: str) -> list[str]:
    """Lines that load a fine-tuned transformer into ``pipe``."""
    path = at_home(source).resolve()
    if (path / SECOND_TRANSFORMER).is_dir():
        return [
            "from pathlib import Path",
            "from safetensors.torch import load_file",
            f"for part in ('transformer', {SECOND_TRANSFORMER!r}):",
            f"    for shard in sorted((Path({str(path)!r}) / part).glob('*.safetensors')):",
            "        getattr(pipe, part).load_state_dict(load_file(shard), strict=False)",
        ]
    if not path.is_dir():
        return [
            "from safetensors.torch import load_file",
            f"pipe.transformer.load_state_dict(load_file({str(path)!r}))",
        ]
    return [
        "from pathlib import Path",
        "from safetensors.torch import load_file",
        f"shards = sorted(Path({str(path)!r}).glob('*.safetensors'))",
        "state = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}",
        "pipe.transformer.load_state_dict(state)",
    ]
