"""A small random vision-language model of Qwen3-VL's classes, for trying a recipe and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
            "<|image_pad|>", "<|video_pad|>")  # fmt: skip
_WIDTH, _HEADS, _PATCH_PX = 32, 2, 16
_STEADY, _AFTER_WORD = 0, 1
"""Channels that no layer changes: one is the same for all tokens, one marks the answers' words."""


def save_tiny_vlm(folder: Path, words: Sequence[str], seed: int = 3) -> Path:
    """Write a random model that answers with one of the words, which one by picture and question.

    Returns:
        The folder.
    """
    tokenizer = _tokenizer(words)
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH,
            "num_hidden_layers": 2, "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS,
            "head_dim": _WIDTH // _HEADS, "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2, "hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH, "num_heads": _HEADS,
            "patch_size": _PATCH_PX, "out_hidden_size": _WIDTH, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
    end = ids("<|im_end|>")
    _steer(model, [ids(word) for word in words], end)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, ids("<|endoftext|>")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    half = [0.5] * 3
    Qwen2VLImageProcessorPil(
        patch_size=_PATCH_PX,
        image_mean=half,
        image_std=half,
        size={"shortest_edge": 32**2, "longest_edge": 128**2},
    ).save_pretrained(folder)
    return folder


def _tokenizer(words: Sequence[str]) -> Qwen2Tokenizer:
    # Its bytes are spelled as GPT-2's: those that print stand for themselves.
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelled = [chr(byte) for byte in printed] + [chr(256 + at) for at in range(256 - len(printed))]
    vocabulary = {token: at for at, token in enumerate(spelled)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=TEMPLATE)
    tokenizer.add_special_tokens({
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": list(_SPECIAL),
    })  # fmt: skip
    tokenizer.add_tokens(list(words))
    return tokenizer


def _steer(model: Qwen3VLForConditionalGeneration, words: Sequence[int], end: int) -> None:
    """After the question comes one of the words, and after a word the end."""
    text, head = model.model.language_model, model.lm_head.weight.data
    embeddings = text.embed_tokens.weight.data
    embeddings[:, [_STEADY, _AFTER_WORD]] = torch.tensor([2.0, 0.0])
    embeddings[words, _AFTER_WORD] = 8.0
    for layer in text.layers:
        layer.self_attn.q_norm.weight.data *= 4  # or all it sees would be averaged
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data[[_STEADY, _AFTER_WORD]] = 0.0
    head[words] *= 4  # or one word would answer everything
    head[:, [_STEADY, _AFTER_WORD]] = 0.0
    head[words, _STEADY] = 10.0
    head[end, _AFTER_WORD] = 20.0
