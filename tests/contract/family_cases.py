"""The model families under the tests of ``test_families.py``: one entry each in :data:`CASES`.

A case says only what differs from a plain picture family: sizes, and how its pipeline is called.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from diffusers.utils import load_image

from spotlight.models.condition import Instruction
from spotlight.models.families.flux2_dev import read_tokenizer
from spotlight.models.families.qwen_image_21 import TextProcessor
from spotlight.models.families.qwen_image_edit import PictureProcessor
from spotlight.models.family import MediaSize, ModelFamily
from spotlight.testing.family_contract import PROMPTS as PROMPTS
from spotlight.testing.family_contract import FamilyCase, Setting, call_video_pipeline

VARIANTS = range(4)


def instructions(
    prompts: Sequence[str], negative: str = " ", size: MediaSize | None = None
) -> Sequence[Instruction]:
    """About one picture or, with an even number of words, about two: their shapes differ in a batch."""
    return [
        Instruction(prompt, PICTURES[: 1 + (len(prompt.split()) % 2 == 0)], negative, size or _EDITED)
        for prompt in prompts
    ]


def about_a_picture(
    prompts: Sequence[str], negative: str = " ", size: MediaSize | None = None
) -> Sequence[Instruction]:
    """About one of two pictures of other shapes, by the number of words."""
    return [
        Instruction(prompt, (PICTURES[len(prompt.split()) % 2],), negative, size or _EDITED)
        for prompt in prompts
    ]


def animations(
    prompts: Sequence[str], negative: str = " ", size: MediaSize | None = None
) -> Sequence[Instruction]:
    """As :func:`about_a_picture`, for videos."""
    return about_a_picture(prompts, negative, size or _VIDEO)


def lettered(prompts: Sequence[str], negative: str = " ", size: MediaSize | None = None) -> Sequence[str]:
    """Longer ones with letters in quotation marks, so that a batch has prompts with and without."""
    return [
        f'{prompt}, with the words "{prompt[:9]}"' if len(prompt.split()) > 5 else prompt
        for prompt in prompts
    ]


def call_hunyuan_video_15(
    pipe: Any, family: ModelFamily, latents: torch.Tensor, setting: Setting
) -> np.ndarray:
    """Its guider has the scale, an attribute the limit of tokens; the VAE can decode one video at a time."""
    pipe.vae.enable_slicing()
    exec("\n".join(family.loading_lines(setting.scale, family.max_text_tokens)), {"pipe": pipe})
    frames = pipe(
        lettered(setting.prompts),
        negative_prompt=[setting.negative] * len(setting.prompts),
        num_inference_steps=setting.steps,
        latents=latents,
        output_type="np",
        **family.size_arguments(setting.size.height, setting.size.width, setting.size.frames),
    ).frames
    return np.asarray(frames)


def _parts_but_the_processor(directory: Path) -> dict[str, Any]:
    """The real one needs torchvision."""
    index = json.loads((directory / "model_index.json").read_text())
    return {
        name: getattr(importlib.import_module(entry[0]), entry[1]).from_pretrained(directory / name)
        for name, entry in index.items()
        if isinstance(entry, list) and entry[0] and name != "sample_sigmas"
        if "Processor" not in entry[1] or name == "image_processor"
    }


def load_qwen_image_21(directory: Path) -> Any:
    """With a processor of ours."""
    index = json.loads((directory / "model_index.json").read_text())
    return diffusers.QwenImage21Pipeline(
        **_parts_but_the_processor(directory),
        processor=TextProcessor(directory / "processor"),
        sample_sigmas=index.get("sample_sigmas"),
    )


def load_qwen_image_edit(directory: Path) -> Any:
    """With a processor of ours."""
    return diffusers.QwenImageEditPlusPipeline(
        **_parts_but_the_processor(directory), processor=PictureProcessor(directory / "processor")
    )


def load_flux2_dev(directory: Path) -> Any:
    """With the processor's tokenizer."""
    parts = _parts_but_the_processor(directory)
    return diffusers.Flux2Pipeline(**parts, tokenizer=read_tokenizer(directory / "tokenizer"))


def load_wan_i2v(directory: Path) -> Any:
    """Without torchvision."""
    settings = json.loads((directory / "model_index.json").read_text())
    own = {key: settings[key] for key in ("boundary_ratio", "expand_timesteps") if key in settings}
    return diffusers.WanImageToVideoPipeline(**_parts_but_the_processor(directory), **own)


def call_with_pictures(pipe: Any, family: ModelFamily, latents: torch.Tensor, setting: Setting) -> np.ndarray:
    """One prompt at a time: the pipelines take no pictures for each of several."""
    inputs = CASES[family.name].inputs(setting.prompts, setting.negative, setting.size)
    made = [
        pipe(
            shown[0] if family.references_max == 1 else shown,
            prompt=instruction.text,
            negative_prompt=setting.negative if setting.scale > 1 else None,
            num_inference_steps=setting.steps,
            latents=row[None],
            output_type="np",
            **({"max_sequence_length": family.max_text_tokens} if family.cuts_prompts else {}),
            **family.size_arguments(setting.size.height, setting.size.width, setting.size.frames),
            **family.call_arguments(setting.scale, setting.embedded),
        )
        for instruction, row in zip(inputs, latents, strict=True)
        for shown in [[load_image(path) for path in instruction.references]]
    ]
    return np.stack([each.frames[0] if family.video else each.images[0][None] for each in made])


def call_qwen_image_21(pipe: Any, family: ModelFamily, latents: torch.Tensor, setting: Setting) -> np.ndarray:
    """One prompt at a time, since padding moves the pipeline's image; without alpha."""
    pictures = [
        pipe(
            prompt,
            negative_prompt=setting.negative if setting.scale > 1 else None,
            height=setting.size.height,
            width=setting.size.width,
            num_inference_steps=setting.steps,
            latents=row[None],
            output_type="np",
            **family.call_arguments(setting.scale, setting.embedded),
        ).images[0]
        for prompt, row in zip(setting.prompts, latents, strict=True)
    ]
    return np.stack(pictures)[:, None, ..., :3]


def call_flux2(pipe: Any, family: ModelFamily, latents: torch.Tensor, setting: Setting) -> np.ndarray:
    """The pipeline packs initial latents itself, and takes other negative prompts as embeddings, or none."""
    side_px = family.dimensions.patch_px
    grid = (setting.size.height // side_px, setting.size.width // side_px)
    limit: dict[str, Any] = {"max_sequence_length": family.max_text_tokens}
    avoided = {}
    if family.guidance_argument is not None:
        embeds, _ = pipe.encode_prompt([setting.negative] * len(setting.prompts), **limit)
        avoided = {"negative_prompt_embeds": embeds}
    pictures = pipe(
        prompt=list(setting.prompts),
        **avoided,
        height=setting.size.height,
        width=setting.size.width,
        num_inference_steps=setting.steps,
        latents=latents.transpose(1, 2).unflatten(2, grid),
        output_type="np",
        **limit,
        **family.call_arguments(setting.scale, setting.embedded),
    ).images
    return np.asarray(pictures)[:, None]


# Both sides read references at these sizes; the real ones, 384² and 1024², take minutes.
pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE = 112 * 112
pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = 96 * 96
pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS = [(64, 96), (96, 64), (160, 64)]
PICTURES = tuple(
    str(Path(__file__).parents[2] / "examples" / "prompts" / "pictures" / name)
    for name in ("house.png", "tree.png")
)
_EDITED = MediaSize(64, 96)

_PICTURE, _VIDEO = MediaSize(32, 48), MediaSize(32, 48, frames=5)
_MEDIUM_PICTURE = MediaSize(32, 64)
_LARGE_PICTURE = MediaSize(32, 96)

_WIDE = {"attention_head_dim": 64, "num_attention_heads": 4}

CASES: Mapping[str, FamilyCase] = {
    case.name: case
    for case in (
        FamilyCase(
            "qwen-image",
            _PICTURE,
            (
                Setting(_PICTURE, 2),
                Setting(_PICTURE, 12, scale=3.0),
                Setting(MediaSize(48, 16), 3, scale=1.5, negative="a green square, blurred"),
            ),
            unused=r"blocks\.1\.(txt_mlp|attn\.(add_q_proj|to_add_out|norm_added_q))",
            wide={"num_layers": 4, "axes_dims_rope": (16, 24, 24), **_WIDE},
        ),
        FamilyCase(
            "qwen-image-edit",
            _EDITED,
            (
                Setting(_EDITED, 2),
                Setting(_EDITED, 6, scale=3.0),
                Setting(MediaSize(96, 32), 3, scale=1.5, negative="a green square, blurred"),
            ),
            max_text_tokens=256,
            call=call_with_pictures,
            load=load_qwen_image_edit,
            inputs=instructions,
            unused=r"blocks\.1\.(txt_mlp|attn\.(add_q_proj|to_add_out|norm_added_q))",
            wide={"num_layers": 4, "axes_dims_rope": (16, 24, 24), **_WIDE},
        ),
        FamilyCase(
            "flux",
            _PICTURE,
            (
                Setting(_PICTURE, 1, embedded=3.5),
                Setting(_PICTURE, 12, scale=3.0, embedded=1.0),
                Setting(MediaSize(48, 16), 3, scale=1.5, embedded=6.0, negative="a green square, blurred"),
            ),
            max_text_tokens=24,
            wide={"num_layers": 2, "num_single_layers": 4, "axes_dims_rope": (16, 24, 24), **_WIDE},
        ),
        FamilyCase(
            "flux-kontext",
            _EDITED,
            (
                Setting(_EDITED, 1, embedded=2.5),
                Setting(_EDITED, 12, scale=3.0, embedded=1.0),
                Setting(MediaSize(96, 32), 3, scale=1.5, embedded=6.0, negative="a green square, blurred"),
            ),
            max_text_tokens=24,
            call=call_with_pictures,
            inputs=about_a_picture,
            wide={"num_layers": 2, "num_single_layers": 4, "axes_dims_rope": (16, 24, 24), **_WIDE},
        ),
        FamilyCase(
            "sd3",
            _PICTURE,
            (
                Setting(_PICTURE, 1),
                Setting(_PICTURE, 12, scale=3.0),
                Setting(MediaSize(48, 16), 3, scale=1.5, negative="a green square, blurred"),
            ),
            max_text_tokens=24,
            unused=r"blocks\.1\.attn\.(add_q_proj|norm_added_q)",
            wide={"num_layers": 4, "dual_attention_layers": (0, 1), "caption_projection_dim": 256, **_WIDE},
        ),
        FamilyCase(
            "qwen-image-2.1",
            _LARGE_PICTURE,
            (
                Setting(_LARGE_PICTURE, 2),
                Setting(_LARGE_PICTURE, 12, scale=3.0),
                Setting(MediaSize(64, 32), 3, scale=1.5, negative="a green square, blurred"),
            ),
            max_text_tokens=128,
            call=call_qwen_image_21,
            load=load_qwen_image_21,
            wide={"num_layers": 32, "axes_dims_rope": (16, 24, 24), **_WIDE},
        ),
        FamilyCase(
            "z-image",
            _MEDIUM_PICTURE,
            (
                Setting(_MEDIUM_PICTURE, 1),
                Setting(_MEDIUM_PICTURE, 12, scale=3.0),
                Setting(MediaSize(48, 16), 3, scale=1.5, negative="a green square, blurred"),
            ),
            unused="x_pad_token",  # the sequence has a multiple of 32 tokens
            wide={"dim": 256, "n_heads": 4, "n_kv_heads": 4, "n_layers": 15, "axes_dims": [16, 24, 24]},
        ),
        FamilyCase(
            "wan",
            _VIDEO,
            (
                Setting(_PICTURE, 1),
                Setting(_VIDEO, 10, scale=5.0, negative="a green square, blurred"),
                Setting(MediaSize(48, 32, frames=9), 3, scale=1.5),
            ),
            max_text_tokens=24,
            call=call_video_pipeline,
            wide={"num_layers": 16, "ffn_dim": 1024, **_WIDE},  # ratios of published models: 2.7 to 5.8
            first=(2, 3),  # two transformers, and a noise level per token
            trained=(0, 2, 3),
        ),
        FamilyCase(
            "wan-i2v",
            _VIDEO,
            (
                Setting(_PICTURE, 1),
                Setting(_VIDEO, 10, scale=5.0, negative="a green square, blurred"),
                Setting(MediaSize(48, 32, frames=9), 3, scale=1.5),
            ),
            max_text_tokens=512,
            call=call_with_pictures,
            load=load_wan_i2v,
            inputs=animations,
            wide={"num_layers": 16, "ffn_dim": 1024, "added_kv_proj_dim": 256, **_WIDE},
            first=(0, 3),  # with an image encoder, and a noise level per token
            trained=(0, 2, 3),
        ),
        FamilyCase(
            "hunyuan-video",
            _VIDEO,
            (
                Setting(_PICTURE, 1, embedded=6.0),
                Setting(_VIDEO, 10, scale=3.0, embedded=1.0, negative="a green square, blurred"),
                Setting(MediaSize(48, 32, frames=9), 3, scale=1.5, embedded=4.0),
            ),
            call=call_video_pipeline,
            wide={
                "num_layers": 6,
                "num_single_layers": 12,
                "mlp_ratio": 4.0,
                "rope_axes_dim": (16, 24, 24),
                **_WIDE,
            },
        ),
        FamilyCase(
            "hunyuan-video-1.5",
            _VIDEO,
            (
                Setting(_PICTURE, 1),
                Setting(_VIDEO, 10, scale=3.0, negative="a green square, blurred"),
                Setting(MediaSize(48, 32, frames=9), 3, scale=1.5),
            ),
            call=call_hunyuan_video_15,
            inputs=lettered,
            unused=r"blocks\.1\.(ff_context|attn\.(add_q_proj|to_add_out|norm_added_q))|image_embedder",
            wide={"num_layers": 12, "mlp_ratio": 4.0, "rope_axes_dim": (16, 24, 24), **_WIDE},
        ),
        FamilyCase(
            "flux2-klein",
            _PICTURE,
            (
                Setting(_PICTURE, 1),
                Setting(_PICTURE, 12, scale=3.0),
                Setting(MediaSize(48, 16), 3, scale=1.5, negative="a green square, blurred"),
            ),
            max_text_tokens=24,
            call=call_flux2,
            wide={"num_layers": 1, "num_single_layers": 4, "axes_dims_rope": (16, 16, 16, 16), **_WIDE},
        ),
        FamilyCase(
            "krea-2",
            _PICTURE,
            (
                Setting(_PICTURE, 1),
                Setting(_PICTURE, 12, scale=3.0),
                Setting(MediaSize(48, 16), 3, scale=1.5, negative="a green square, blurred"),
            ),
            trained=(0, 1),
            wide={
                "num_layers": 28,
                "num_key_value_heads": 1,
                "intermediate_size": 683,
                "axes_dims_rope": (16, 24, 24),
                **_WIDE,
            },
        ),
        FamilyCase(
            "flux2-dev",
            _PICTURE,
            (
                Setting(_PICTURE, 1, embedded=4.0),
                Setting(_PICTURE, 12, embedded=1.0),
                Setting(MediaSize(48, 16), 3, embedded=6.0),
            ),
            max_text_tokens=64,
            call=call_flux2,
            load=load_flux2_dev,
            first=(1,),  # variant 0 is trained as FLUX.2-klein is, in the slow tier
            wide={"num_layers": 1, "num_single_layers": 6, "axes_dims_rope": (16, 16, 16, 16), **_WIDE},
        ),
    )
}

TRAINED = [(name, variant) for name, case in CASES.items() for variant in case.trained]
TRAINED_BY_TIER = [
    pytest.param(name, variant, marks=() if variant in CASES[name].first else pytest.mark.slow)
    for name, variant in TRAINED
]

VARIATIONS = [
    pytest.param(case.name, variant, marks=() if variant in case.first else pytest.mark.slow)
    for case in CASES.values()
    for variant in VARIANTS
]
"""(family, variant): those of the first tier, the others slow."""

FULL_FIRST = ("qwen-image", "wan")
TRAININGS = [
    pytest.param(
        name,
        variant,
        algorithm,
        mode,
        marks=()
        if variant in CASES[name].first
        and (
            (algorithm, mode) == ("flow-grpo-fast", "lora")
            or ((algorithm, mode) == ("diffusion-nft", "full") and name in FULL_FIRST)
        )
        else pytest.mark.slow,
    )
    for name, variant in TRAINED
    for algorithm in ("flow-grpo-fast", "diffusion-nft", "awm")
    for mode in ("lora", "full")
]
"""(family, variant, algorithm, mode): the first tier replays LoRA of every family and trains two in full."""
