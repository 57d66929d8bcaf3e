"""Convert OpenMMLab's Mask2Former (mmdet 2.x, Swin backbone), GenEval's own detector, to transformers.

Apart from names, three things differ. mmdet keeps query, key and value of an attention in one matrix, where
transformers has three (but for the decoder's cross-attention). Its patch merging reads the four pixels it
merges channel by channel, transformers pixel by pixel, the lower left one before the upper right one. Its
window indices are stored, and must be those that transformers computes.

Facts: mmdet 2.27's ``mask2former_head.py``, ``msdeformattn_pixel_decoder.py`` and ``swin.py``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from math import isqrt
from pathlib import Path
from typing import Any

import torch

from spotlight_rewards.base.file_errors import is_there, storage_errors
from spotlight_rewards.base.files import removed_if_failed
from spotlight_rewards.geneval.mask2former import UNREAD
from spotlight_rewards.geneval.vocabulary import OBJECTS
from spotlight_rewards.models.pretrained_model import by_part, converted_state, first_line, renamed
from spotlight_rewards.reward import RewardSetupError

_EXPECTED = (
    "expected OpenMMLab's mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth, "
    "or another Mask2Former with a Swin backbone, written by mmdet 2.x."
)
_BLOCK = r"backbone\.stages\.(\d+)\.blocks\.(\d+)\."
_ENCODER = r"panoptic_head\.pixel_decoder\.encoder\.layers\.(\d+)\."
_DECODER = r"panoptic_head\.transformer_decoder\.layers\.(\d+)\."
_TO_BLOCK = r"model.pixel_level_module.encoder.swin.encoder.layers.\1.blocks.\2."
_TO_EMBEDDINGS = r"model.pixel_level_module.encoder.swin.embeddings."
_TO_PIXELS = r"model.pixel_level_module.decoder."
_TO_ENCODER = _TO_PIXELS + r"encoder.layers.\1."
_TO_QUERIES = r"model.transformer_module."
_TO_DECODER = _TO_QUERIES + r"decoder.layers.\1."

_RENAMED = {
    r"backbone\.patch_embed\.projection\.": _TO_EMBEDDINGS + "patch_embeddings.projection.",
    r"backbone\.patch_embed\.norm\.": _TO_EMBEDDINGS + "norm.",
    _BLOCK + r"norm1\.": _TO_BLOCK + "layernorm_before.",
    _BLOCK + r"norm2\.": _TO_BLOCK + "layernorm_after.",
    _BLOCK + r"attn\.w_msa\.qkv\.": _TO_BLOCK + "attention.{part}_proj.",
    _BLOCK + r"attn\.w_msa\.proj\.": _TO_BLOCK + "attention.o_proj.",
    _BLOCK + r"attn\.w_msa\.(relative_position_bias_table)$": _TO_BLOCK
    + r"attention.relative_position_bias.\3",
    _BLOCK + r"ffn\.layers\.0\.0\.": _TO_BLOCK + "mlp.fc1.",
    _BLOCK + r"ffn\.layers\.1\.": _TO_BLOCK + "mlp.fc2.",
    r"backbone\.stages\.(\d+)\.downsample\.": (
        r"model.pixel_level_module.encoder.swin.encoder.layers.\1.downsample."
    ),
    r"backbone\.norm(\d)\.": r"model.pixel_level_module.encoder.hidden_states_norms.stage\1.",
    r"panoptic_head\.pixel_decoder\.input_convs\.(\d)\.conv\.": _TO_PIXELS + r"input_projections.\1.0.",
    r"panoptic_head\.pixel_decoder\.input_convs\.(\d)\.gn\.": _TO_PIXELS + r"input_projections.\1.1.",
    r"panoptic_head\.pixel_decoder\.level_encoding\.weight$": _TO_PIXELS + "level_embed",
    r"panoptic_head\.pixel_decoder\.lateral_convs\.0\.conv\.": _TO_PIXELS + "adapter_1.0.",
    r"panoptic_head\.pixel_decoder\.lateral_convs\.0\.gn\.": _TO_PIXELS + "adapter_1.1.",
    r"panoptic_head\.pixel_decoder\.output_convs\.0\.conv\.": _TO_PIXELS + "layer_1.0.",
    r"panoptic_head\.pixel_decoder\.output_convs\.0\.gn\.": _TO_PIXELS + "layer_1.1.",
    r"panoptic_head\.pixel_decoder\.mask_feature\.": _TO_PIXELS + "mask_projection.",
    _ENCODER + r"attentions\.0\.(?=(?:sampling_offsets|attention_weights|value_proj|output_proj)\.)": (
        _TO_ENCODER + "self_attn."
    ),
    _ENCODER + r"norms\.0\.": _TO_ENCODER + "self_attn_layer_norm.",
    _ENCODER + r"norms\.1\.": _TO_ENCODER + "final_layer_norm.",
    _ENCODER + r"ffns\.0\.layers\.0\.0\.": _TO_ENCODER + "fc1.",
    _ENCODER + r"ffns\.0\.layers\.1\.": _TO_ENCODER + "fc2.",
    r"panoptic_head\.query_embed\.": _TO_QUERIES + "queries_embedder.",
    r"panoptic_head\.query_feat\.": _TO_QUERIES + "queries_features.",
    r"panoptic_head\.level_embed\.": _TO_QUERIES + "level_embed.",
    _DECODER + r"attentions\.0\.attn\.": _TO_DECODER + "cross_attn.",
    _DECODER + r"attentions\.1\.attn\.in_proj_": _TO_DECODER + "self_attn.{part}_proj.",
    _DECODER + r"attentions\.1\.attn\.out_proj\.": _TO_DECODER + "self_attn.out_proj.",
    _DECODER + r"norms\.0\.": _TO_DECODER + "cross_attn_layer_norm.",
    _DECODER + r"norms\.1\.": _TO_DECODER + "self_attn_layer_norm.",
    _DECODER + r"norms\.2\.": _TO_DECODER + "final_layer_norm.",
    _DECODER + r"ffns\.0\.layers\.0\.0\.": _TO_DECODER + "fc1.",
    _DECODER + r"ffns\.0\.layers\.1\.": _TO_DECODER + "fc2.",
    r"panoptic_head\.transformer_decoder\.post_norm\.": _TO_QUERIES + "decoder.layernorm.",
    r"panoptic_head\.cls_embed\.": "class_predictor.",
    r"panoptic_head\.mask_embed\.(\d)\.": _TO_QUERIES + r"decoder.mask_predictor.mask_embedder.\1.0.",
}
"""Beginning of a name in mmdet -> in transformers. ``{part}``: split into q, k and v."""
_RENUMBERED = (
    (r"(?<=hidden_states_norms\.stage)\d", lambda n: n + 1),
    (r"(?<=mask_embedder\.)\d", lambda n: n // 2),
)
_COMPUTED = re.compile(_BLOCK + r"attn\.w_msa\.relative_position_index$")
_MERGED = re.compile(r"\.downsample\.(norm|reduction)\.")


def convert_checkpoint(checkpoint: Path, out: Path) -> tuple[str, int]:
    """Write the directory that the reward's ``detector`` takes.

    Returns:
        The checkpoint's name with its digest, as results will have it, and the number of tensors read.

    Raises:
        RewardSetupError: no such checkpoint, a damaged one, or one whose weights do not map one to one;
            ``out`` is not empty.
    """
    if is_there(out) and (not out.is_dir() or any(out.iterdir())):
        raise RewardSetupError(f"{out} is not empty; expected a new directory. Name another, or remove it.")
    state, origin = read_checkpoint(checkpoint)
    try:
        model = converted_model(state)
    except RewardSetupError as error:
        raise RewardSetupError(f"{checkpoint}: {error}") from error
    model.config.converted_from = origin
    with removed_if_failed(out), storage_errors("cannot write the detector", out):
        out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(out)
    return origin, len(state)


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """A checkpoint's tensors, and its name with the beginning of its SHA-256. Raises RewardSetupError.

    OpenMMLab's file names end with that digest, so that a damaged download is found.
    """
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        named = re.search(r"-([0-9a-f]{8})\.pth$", path.name)
        if named and not digest.startswith(named[1]):
            raise RewardSetupError(
                f"{path} has the SHA-256 {digest[:8]}..., its name says {named[1]}: it is damaged. "
                "Download it again."
            )
        content = torch.load(path, map_location="cpu", weights_only=True)
        state = content["state_dict"]
        tensors = {str(name): tensor.detach() for name, tensor in state.items()}
    except RewardSetupError:
        raise
    except Exception as error:
        raise RewardSetupError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {first_line(error)}); "
            f"{_EXPECTED}"
        ) from error
    return tensors, f"openmmlab/{path.name}:{digest[:8]}"


def converted_model(state: Mapping[str, torch.Tensor]) -> Any:
    """transformers' Mask2Former with a checkpoint's weights, in evaluation mode.

    Raises:
        RewardSetupError: a name or a shape that does not map, or a weight without a counterpart.
    """
    from transformers import Mask2FormerForUniversalSegmentation

    model = Mask2FormerForUniversalSegmentation(_config(state)).eval()
    own = {name: tensor for name, tensor in model.state_dict().items() if not re.search(UNREAD, name)}
    converted = converted_state(state, own, _targets, _EXPECTED, _is_computed)
    model.load_state_dict(converted, strict=False)  # complete but for what is not read
    return model


def _targets(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not (target := renamed(name, _RENAMED)):
        return
    for pattern, renumber in _RENUMBERED:
        target = re.sub(pattern, lambda match, to=renumber: str(to(int(match[0]))), target)  # type: ignore[misc]
    yield from by_part(target, _by_pixel(tensor) if _MERGED.search(target) else tensor)


def _by_pixel(tensor: torch.Tensor) -> torch.Tensor:
    """[..., channels x 2 rows x 2 columns] to [..., 2 columns x 2 rows x channels]."""
    *others, merged = tensor.shape
    return tensor.reshape(*others, merged // 4, 2, 2).transpose(-1, -3).reshape(tensor.shape)


def _is_computed(name: str, tensor: torch.Tensor) -> bool:
    """Whether this is a window's index, and the one that transformers computes."""
    if not _COMPUTED.match(name):
        return False
    side = isqrt(tensor.shape[0])
    row, column = (
        each.flatten() for each in torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    )
    down, right = (each[:, None] - each[None] + side - 1 for each in (row, column))
    return torch.equal(tensor.long(), down * (2 * side - 1) + right)


def _config(state: Mapping[str, torch.Tensor]) -> Any:
    """The architecture, as the tensors' shapes tell it. Raises RewardSetupError."""
    from transformers import Mask2FormerConfig, SwinConfig

    def rows(name: str, axis: int = 0) -> int:
        if name not in state:
            raise RewardSetupError(f"{name!r} is missing; {_EXPECTED}")
        return state[name].shape[axis]

    def count(beginning: str) -> int:
        return len({match[1] for name in state if (match := re.match(beginning + r"\.(\d+)\.", name))})

    first, head = "backbone.stages.{}.blocks.0.", "panoptic_head."
    table = first + "attn.w_msa.relative_position_bias_table"
    stages = count(r"backbone\.stages")
    width = rows("backbone.patch_embed.projection.weight")
    pixels, queries = head + "pixel_decoder.", head + "transformer_decoder."
    swin = SwinConfig(
        embed_dim=width,
        patch_size=rows("backbone.patch_embed.projection.weight", -1),
        depths=[count(rf"backbone\.stages\.{stage}\.blocks") for stage in range(stages)],
        num_heads=[rows(table.format(stage), 1) for stage in range(stages)],
        window_size=(isqrt(rows(table.format(0))) + 1) // 2,
        mlp_ratio=rows(first.format(0) + "ffn.layers.0.0.weight") / width,
        out_features=[f"stage{stage + 1}" for stage in range(stages)],
    )
    return Mask2FormerConfig(
        backbone_config=swin,
        feature_size=rows(pixels + "mask_feature.weight", 1),
        mask_feature_size=rows(pixels + "mask_feature.weight"),
        hidden_dim=rows(head + "query_feat.weight", 1),
        encoder_layers=count(re.escape(pixels + "encoder.layers")),
        encoder_feedforward_dim=rows(pixels + "encoder.layers.0.ffns.0.layers.0.0.weight"),
        decoder_layers=count(re.escape(queries + "layers"))
        + 1,  # transformers counts the queries' own prediction
        dim_feedforward=rows(queries + "layers.0.ffns.0.layers.0.0.weight"),
        # Two coordinates of four points on three levels for each head.
        num_attention_heads=rows(pixels + "encoder.layers.0.attentions.0.sampling_offsets.weight") // 24,
        num_queries=rows(head + "query_feat.weight"),
        dropout=0.0,
        id2label=dict(enumerate(OBJECTS)),
        label2id={name: index for index, name in enumerate(OBJECTS)},
    )
