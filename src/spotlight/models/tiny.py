"""Small random pipelines of the real classes, with a published model's configurations shrunk (``TinyModel``).

Guarantees: nothing is downloaded; the same seed gives the same weights; every parameter is random, so outputs
depend on all inputs and all layers, zero-initialised ones included.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spotlight.models.family_facts import FamilyTraits
from spotlight_files.model_errors import ModelError

_PRINTABLE = [chr(code) for code in range(33, 127)]


def write_pipeline(family: type[FamilyTraits], directory: Path, seed: int, variant: int) -> None:
    """Write a pipeline directory, in float32: transformers loads components in their stored dtype, so
    half-precision files would lower the precision of everything.
    """
    import diffusers

    if not 0 <= variant < len(family.tiny_models):
        raise ModelError(
            f"model.family {family.name} has {len(family.tiny_models)} small pipelines; variant {variant} is "
            "asked for: add it to its tiny_models, or override its tiny"
        )
    tiny, generator = family.tiny_models[variant], torch.Generator().manual_seed(seed)
    published = family.published[tiny.model]
    index: dict[str, object] = {
        "_class_name": family.pipeline_class,
        "_diffusers_version": diffusers.__version__,
        **published.settings,
        **tiny.changes.get("model_index", {}),
    }
    tokenizers: dict[str, Any] = {}
    for name, component in family.components.items():
        known = published.configs.get(name, {})
        if component.optional and name not in {*published.configs, *tiny.changes}:
            index[name] = None, None
            continue
        config: dict[str, Any] = {**known, **tiny.changes.get(name, {})}
        kind = config.pop("_class_name", component.classes[0])
        files, number = config.pop("files", {}), re.sub("[a-z_]+", "", name)
        if name.startswith(("tokenizer", "processor")):
            part = tokenizers[number] = _tokenizer(kind, **config)
        elif name.startswith("image"):
            part = _image_part(kind, config)
        elif name.startswith("text_encoder"):
            part = _text_encoder(kind, tokenizers[number], **config)
        else:
            part = _diffusers_part(kind, config)
        if isinstance(part, nn.Module):
            _randomize(part, generator)
        part.save_pretrained(directory / name)
        for file, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2)
            (directory / name / file).write_text(text, encoding="utf-8")
        index[name] = type(part).__module__.partition(".")[0], kind if files else type(part).__name__
    (directory / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


@torch.no_grad()
def _randomize(module: nn.Module, generator: torch.Generator) -> None:
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
    for part in module.modules():
        if (
            isinstance(part, nn.BatchNorm2d)
            and part.running_mean is not None
            and part.running_var is not None
        ):
            part.get_buffer("running_mean").copy_(torch.linspace(-1, 1, part.num_features))
            part.get_buffer("running_var").copy_(torch.linspace(0.5, 2, part.num_features))
    module.eval()


def _diffusers_part(kind: str, config: dict[str, Any]) -> Any:
    """A transformer, a VAE with blocks and statistics of the latents for its new sizes, or a scheduler."""
    import diffusers

    cls = getattr(diffusers, kind)
    for blocks in ("down_block_types", "up_block_types"):
        if blocks in config:
            config[blocks] = config[blocks][:1] * len(config["block_out_channels"])
    if "z_dim" in config and "latents_mean" in inspect.signature(cls.__init__).parameters:
        config["latents_mean"] = [0.1 * i - 0.5 for i in range(config["z_dim"])]
        config["latents_std"] = [1 + 0.1 * i for i in range(config["z_dim"])]
    return cls(**config)


def _tokenizer(kind: str, **options: Any) -> Any:
    if kind.startswith("CLIP"):
        return _clip_tokenizer(**options)
    if kind.startswith("T5"):
        return _t5_tokenizer(**options)
    if kind.startswith("ByT5"):
        return _byte_tokenizer()
    return _llama_tokenizer(**options) if kind.startswith("Llama") else _qwen2_tokenizer(**options)


def _clip_tokenizer(pad: str = "<|endoftext|>") -> Any:
    """77 tokens at most: one token per byte, the end token last, as in CLIP.

    Args:
        pad: the padding token; ``!`` in the larger CLIP of Stable Diffusion 3.
    """
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=pad, model_max_length=77)


def _t5_tokenizer() -> Any:
    """One token per ASCII character."""
    from transformers import T5Tokenizer

    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces = [*specials, *((letter, -3.0) for letter in _PRINTABLE)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def _byte_tokenizer() -> Any:
    """One token per byte, as published."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def _qwen2_tokenizer(corpus: Sequence[str], special: Sequence[str], chat_template: str | None = None) -> Any:
    """Every word of ``corpus`` is one token, others are split down to bytes.

    Args:
        corpus: e.g. a prompt template, which then has as many tokens as it has words and signs.
        special: tokens never split, ``<|endoftext|>`` first.
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    learned = _pieces(
        Qwen2Tokenizer().backend_tokenizer.pre_tokenizer,
        corpus,
        special,
        vocab_size=4096,  # more than needed: merging ends when every word is one token
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer = Qwen2Tokenizer(**learned, additional_special_tokens=special[1:], model_max_length=4096)
    tokenizer.chat_template = chat_template
    return tokenizer


def _llama_tokenizer(corpus: Sequence[str], special: Sequence[str]) -> Any:
    """Pads on the right, with a few pieces learned from ``corpus``."""
    from tokenizers import pre_tokenizers
    from transformers import LlamaTokenizer

    learned = _pieces(
        pre_tokenizers.Metaspace(),
        corpus,
        special,
        vocab_size=270,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[*_PRINTABLE, "▁"],
    )
    return LlamaTokenizer(
        **learned,
        additional_special_tokens=special,
        pad_token="</s>",
        padding_side="right",
        model_max_length=512,
    )


def _pieces(pre_tokenizer: Any, corpus: Sequence[str], special: Sequence[str], **options: Any) -> Any:
    """Vocabulary and merges of byte-pair encoding, learned from what is between the special tokens."""
    from tokenizers import Tokenizer, models, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(min_frequency=1, show_progress=False, **options)
    boundaries = "|".join(map(re.escape, special))
    learner.train_from_iterator([part for text in corpus for part in re.split(boundaries, text)], trainer)
    learned = json.loads(learner.to_str())["model"]
    return {"vocab": learned["vocab"], "merges": [tuple(merge) for merge in learned["merges"]]}


def _text_encoder(
    kind: str, tokenizer: Any, width: int, layers: int = 2, projection: int | None = None
) -> Any:
    """A text encoder with the tokenizer's vocabulary; a vision tower is minimal.

    Args:
        width: of the hidden states; of language models, 16 n.
        projection: width of CLIP's pooled output.
    """
    import transformers

    ids = {f"{each}_token_id": getattr(tokenizer, f"{each}_token_id") for each in ("bos", "eos", "pad")}
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "max_position_embeddings": tokenizer.model_max_length,
        **ids,
    }
    grouped = {"num_attention_heads": width // 16, "num_key_value_heads": 1, "head_dim": 16}
    if kind.startswith("CLIP"):
        config |= {"num_attention_heads": 2, "projection_dim": projection or width}
    elif "T5" in kind:
        config = {
            "vocab_size": len(tokenizer),
            "d_model": width,
            "d_kv": 8,
            "d_ff": 2 * width,
            "num_layers": layers,
            "num_heads": 2,
            "feed_forward_proj": "gated-gelu",
            **ids,
        }
    elif "VL" in kind:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],  # of Qwen2.5-VL
            "num_position_embeddings": 16,  # this and the next of Qwen3-VL
            "deepstack_visual_indexes": [0],
        }
        text = {**config, **grouped, "rope_parameters": rope}
        config = {
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": True,
            **_vision_tokens(tokenizer),
        }
        if kind.endswith("TextModel"):
            config = text
    elif kind.startswith("Mistral3"):
        layer = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        config = {
            "text_config": {**config, **grouped, "model_type": "mistral"},
            "vision_config": {**layer, "num_hidden_layers": 1, "model_type": "pixtral"},
        }
    else:
        config |= {**grouped, "tie_word_embeddings": True}
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**config))


def _image_part(kind: str, config: dict[str, Any]) -> Any:
    """What shows a picture to an image encoder, or that encoder."""
    import transformers

    cls = getattr(transformers, kind)
    return cls(cls.config_class(**config)) if hasattr(cls, "config_class") else cls(**config)


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
