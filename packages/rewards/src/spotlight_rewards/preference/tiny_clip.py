"""Small random CLIP models of the real classes, for trying a recipe without a download."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from spotlight_rewards.preference.open_clip_weights import FILES, PIXELS_HEAD, TEXT_HEAD

SIDE_PX = 24
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_tiny_clip(folder: Path, width: int = 16) -> Path:
    """Write a random CLIP with its processor and a tokenizer that spells; returns the folder.

    Args:
        width: of the embeddings that are compared.
    """
    tokens = save_spelling_tokenizer(folder)
    ends = {"bos_token_id": tokens - 2, "eos_token_id": tokens - 1, "pad_token_id": tokens - 1}
    config = CLIPConfig(
        text_config={**_SIZES, **ends, "vocab_size": tokens, "max_position_embeddings": 77},
        vision_config={**_SIZES, "image_size": SIDE_PX, "patch_size": 8},
        projection_dim=width,
    )
    model, generator = CLIPModel(config), torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim():  # the temperature keeps its initial value, which is plausible
            weight.data = torch.randn(weight.shape, generator=generator) * (2 / weight.shape[-1]) ** 0.5
    model.save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": SIDE_PX}, crop_size={"height": SIDE_PX, "width": SIDE_PX}
    ).save_pretrained(folder)
    return folder


def save_spelling_tokenizer(folder: Path) -> int:
    """Write a CLIP tokenizer whose tokens are single characters; returns their number."""
    characters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    tokens = [*characters, *(f"{each}</w>" for each in characters), "<|startoftext|>", "<|endoftext|>"]
    CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=77
    ).save_pretrained(folder)
    return len(tokens)


def save_tiny_open_clip(folder: Path, tokens: int) -> Path:
    """Write a small random checkpoint, in open_clip's names; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": random_checkpoint(tokens)}, folder / FILES[-1])
    return folder


def random_checkpoint(
    tokens: int,
    *,
    heads: tuple[int, int] = (1, 1),
    layers: tuple[int, int] = (1, 1),
    grid: int = 3,
    patch_px: int = 8,
    width: int = 16,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Random weights of a small CLIP whose heads are as wide as ViT-H-14's, in open_clip's names.

    Args:
        heads, layers: of the pictures' tower and the texts'.
        grid: patches of a side.
        width: of the embeddings that are compared.
    """
    pixels, text = heads[0] * PIXELS_HEAD, heads[1] * TEXT_HEAD
    shapes: dict[str, tuple[int, ...]] = {
        "visual.class_embedding": (pixels,),
        "visual.conv1.weight": (pixels, 3, patch_px, patch_px),
        "visual.positional_embedding": (grid**2 + 1, pixels),
        "visual.proj": (pixels, width),
        "token_embedding.weight": (tokens, text),
        "positional_embedding": (77, text),
        "text_projection": (text, width),
        "logit_scale": (),
    }
    for norm, size in (("visual.ln_pre", pixels), ("visual.ln_post", pixels), ("ln_final", text)):
        shapes |= {f"{norm}.weight": (size,), f"{norm}.bias": (size,)}
    for tower, size, count in (("visual.", pixels, layers[0]), ("", text, layers[1])):
        for layer in range(count):
            block = f"{tower}transformer.resblocks.{layer}"
            for norm in ("ln_1", "ln_2"):
                shapes |= {f"{block}.{norm}.weight": (size,), f"{block}.{norm}.bias": (size,)}
            shapes |= {
                f"{block}.attn.in_proj_weight": (3 * size, size),
                f"{block}.attn.in_proj_bias": (3 * size,),
            }
            for name, rows, columns in (
                ("attn.out_proj", size, size), ("mlp.c_fc", 2 * size, size), ("mlp.c_proj", size, 2 * size)
            ):  # fmt: skip
                shapes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / max(shape[-1:], default=1) ** 0.5
        for name, shape in shapes.items()
    }
