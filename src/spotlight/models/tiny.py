"""Parts of small random pipelines: real classes, tokenizers built from scratch, random weights.

Guarantees: nothing is downloaded; the same seed gives the same weights; every parameter is random, so outputs
depend on all inputs and all layers, zero-initialised ones included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

CLIP_MAX_TOKENS = 77
_PRINTABLE = [chr(code) for code in range(33, 127)]


def write_pipeline(pipeline_class: str, directory: Path, seed: int, **parts: Any) -> None:
    """Randomize the modules among ``parts`` and write a pipeline directory, in float32.

    ``parts``: components, or options of the pipeline.

    transformers loads components in their stored dtype, so half-precision files would lower the precision of
    everything.
    """
    import diffusers

    generator = torch.Generator().manual_seed(seed)
    index: dict[str, object] = {
        "_class_name": pipeline_class,
        "_diffusers_version": diffusers.__version__,
    }
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            randomize(part, generator)
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(directory / name)
            index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
        else:
            index[name] = part
    (directory / "model_index.json").write_text(json.dumps(index, indent=2))


@torch.no_grad()
def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Redraw all parameters in place: matrices keep their inputs' scale, norms stay near 1, biases near 0."""
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        fan_in = parameter.numel() // parameter.shape[0] if parameter.ndim else 1
        if name.endswith("bias"):
            values *= 0.1
        elif fan_in == 1 or parameter.numel() == max(parameter.shape):
            values = 1 + 0.1 * values
        else:
            values *= fan_in**-0.5
        parameter.copy_(values)
    module.eval()


def clip_tokenizer(pad: str = "<|endoftext|>") -> Any:
    """CLIP's tokenizer, 77 tokens at most: one token per byte, the end token last, as in CLIP.

    Args:
        pad: the padding token; ``!`` in the larger CLIP of Stable Diffusion 3.
    """
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=pad, model_max_length=CLIP_MAX_TOKENS)


def t5_tokenizer(max_tokens: int = 512) -> Any:
    """T5's tokenizer: one token per ASCII character."""
    from transformers import T5Tokenizer

    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces = [*specials, *((letter, -3.0) for letter in _PRINTABLE)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_tokens)


def qwen2_tokenizer(corpus: Sequence[str], specials: Sequence[str], max_tokens: int = 4096) -> Any:
    """Qwen2's tokenizer; every word of ``corpus`` is one token, others are split down to bytes.

    Args:
        corpus: e.g. a prompt template, which then has as many tokens as it has words and signs.
        specials: tokens never split, ``<|endoftext|>`` first.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # more than needed: merging ends when every word is one token
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    boundaries = "|".join(map(re.escape, specials))
    learner.train_from_iterator([part for text in corpus for part in re.split(boundaries, text)], trainer)
    learned = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        additional_special_tokens=list(specials[1:]),
        model_max_length=max_tokens,
    )


def qwen3_tokenizer() -> Any:
    """Qwen2's tokenizer with the chat markup of Qwen3."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = qwen2_tokenizer(["user\n assistant\n"], special)
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    return tokenizer


def clip_text_encoder(tokenizer: Any, width: int, *, projection: int | None = None) -> Any:
    """``CLIPTextModel`` of two layers; with ``projection``, ``CLIPTextModelWithProjection`` to that width."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=projection or width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config) if projection is None else CLIPTextModelWithProjection(config)


def t5_text_encoder(tokenizer: Any, width: int, *, multilingual: bool = False) -> Any:
    """``T5EncoderModel``, or ``UMT5EncoderModel``, of two layers with gated GELU, as T5 v1.1."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    config_class, kind = (UMT5Config, UMT5EncoderModel) if multilingual else (T5Config, T5EncoderModel)
    config = config_class(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return kind(config)


def qwen2_5_vl_text_encoder(tokenizer: Any, width: int) -> Any:
    """``Qwen2_5_VLForConditionalGeneration`` of two layers; its vision tower is minimal. ``width``: 16 n."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": width // 16,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
        },
        tie_word_embeddings=True,
        **_vision_tokens(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _vision_tokens(tokenizer: Any) -> dict[str, int]:
    """Ids of the tokens that stand for pictures, if the tokenizer has them."""
    vocabulary = tokenizer.get_vocab()
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: vocabulary[token] for name, token in names.items() if token in vocabulary}


def qwen3_vl_text_encoder(tokenizer: Any, width: int) -> Any:
    """``Qwen3VLForConditionalGeneration`` of two layers; its vision tower is minimal. ``width``: 16 n."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": width // 16,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": width,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        **_vision_tokens(tokenizer),
    )
    return Qwen3VLForConditionalGeneration(config)


def qwen3_config(tokenizer: Any, width: int, layers: int) -> Any:
    """Of a Qwen3 language model; ``width``: 16 n."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def image_vae(channels: int, factor: int, width: int, **config: Any) -> Any:
    """``AutoencoderKL`` for pictures, with attention and without quantisation convolutions.

    Args:
        channels: of the latents.
        factor: pixels per latent, a power of 2.
        width: of the outermost layers, a multiple of 4.
        config: e.g. ``scaling_factor`` and ``shift_factor``.
    """
    from diffusers import AutoencoderKL

    levels = factor.bit_length()
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
        block_out_channels=[width] * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **config,
    )


def llama_tokenizer(corpus: str, vocabulary: int, max_tokens: int = 512) -> Any:
    """Llama's tokenizer, padding on the right, with so many pieces learned from ``corpus``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaTokenizer

    specials = sorted(set(re.findall(r"<\|\w+\|>", corpus)))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[*_PRINTABLE, "▁"],
        show_progress=False,
    )
    learner.train_from_iterator(re.split("|".join(map(re.escape, specials)), corpus), trainer)
    learned = json.loads(learner.to_str())["model"]
    return LlamaTokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        additional_special_tokens=specials,
        pad_token="</s>",
        padding_side="right",
        model_max_length=max_tokens,
    )


def llama_text_encoder(tokenizer: Any, width: int) -> Any:
    """``LlamaModel`` of four layers: the third last hidden state is used. ``width``: 8 n."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 8,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaModel(config)
