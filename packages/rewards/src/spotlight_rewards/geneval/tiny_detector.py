"""A small random detector of GenEval's class, for trying a recipe without a download."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

from spotlight_rewards.geneval.vocabulary import OBJECTS

_WIDTH = 32  # of the normalised groups, at least


def save_tiny_detector(folder: Path) -> Path:
    """Write a random Mask2Former of COCO's classes, about 1 MB; returns the folder."""
    config = Mask2FormerConfig(
        backbone_config=SwinConfig(
            embed_dim=4, depths=[1] * 4, num_heads=[1] * 4, window_size=2,
            out_features=[f"stage{stage}" for stage in range(1, 5)],
        ),
        feature_size=_WIDTH, mask_feature_size=_WIDTH, hidden_dim=_WIDTH, num_attention_heads=2,
        encoder_layers=1, encoder_feedforward_dim=_WIDTH, decoder_layers=2, dim_feedforward=_WIDTH,
        num_queries=8,
        id2label=dict(enumerate(OBJECTS)), label2id={name: index for index, name in enumerate(OBJECTS)},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mask2FormerForUniversalSegmentation(config)
    model.class_predictor.weight.data *= 50  # sure enough of what it sees to pass GenEval's thresholds
    model.save_pretrained(folder)
    return folder
