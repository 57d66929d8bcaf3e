"""Tiny random models of the real classes, in which the detector is sure of what it sees."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.unit.openmmlab_forward import PIXELS, Shape, random_checkpoint

SHAPE = Shape(width=4, depths=(1, 1, 1, 1), heads=(1, 1, 1, 1), window=2, hidden=32, attention_heads=1,
              encoder_layers=1, decoder_layers=2, queries=24)  # fmt: skip
CLIP_SIDE = 24


def sure_checkpoint() -> dict[str, torch.Tensor]:
    """Random weights whose queries see different classes with certainty, and small objects."""
    state = random_checkpoint(SHAPE, seed=10)
    state["panoptic_head.query_feat.weight"] *= 6
    for name in state:
        if "transformer_decoder" in name and ("out_proj" in name or "ffns.0.layers.1." in name):
            state[name] *= 0.1
    state["panoptic_head.cls_embed.weight"] *= 5
    state["panoptic_head.cls_embed.bias"][:] = 0
    state["panoptic_head.cls_embed.bias"][-1] = 8
    features = state[f"{PIXELS}.mask_feature.weight"]
    features -= features.mean(1, keepdim=True)
    features *= 8
    # One feature is constant, and holds every mask's logits down but for their peaks.
    features[0], state[f"{PIXELS}.mask_feature.bias"][:] = 0, 0
    state[f"{PIXELS}.mask_feature.bias"][0] = 1
    state[f"{PIXELS}.output_convs.0.gn.weight"][:] = 1
    state[f"{PIXELS}.output_convs.0.gn.bias"][:] = 0
    state["panoptic_head.mask_embed.4.weight"][0] = 0
    state["panoptic_head.mask_embed.4.bias"][0] = -150
    return state


def save_detector(out: Path, **changes: torch.Tensor) -> Path:
    """A converted detector that passes GenEval's thresholds."""
    from spotlight_rewards.geneval.openmmlab import convert_checkpoint

    checkpoint = out.with_suffix(".pth")
    torch.save({"state_dict": sure_checkpoint() | changes}, checkpoint)
    convert_checkpoint(checkpoint, out)
    return out


def save_clip(out: Path) -> Path:
    """A CLIP of two narrow towers, with a tokenizer that spells."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz-"]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1, "pad_token_id": len(tokens) - 1}
    config = CLIPConfig(
        text_config={**sizes, **ends, "vocab_size": len(tokens), "max_position_embeddings": 77},
        vision_config={**sizes, "image_size": CLIP_SIDE, "patch_size": 8},
        projection_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = CLIPModel(config)
    generator = torch.Generator().manual_seed(4)
    for weight in model.parameters():
        if weight.dim() > 1:  # transformers' initial weights make all pictures alike
            weight.data = torch.randn(weight.shape, generator=generator) * (2 / weight.shape[-1]) ** 0.5
    model.save_pretrained(out)
    CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(out)
    return out
