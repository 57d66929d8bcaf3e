"""The pace of a run on this machine's GPUs, from the operations of its model and the rate of the card."""

from __future__ import annotations

import re

from spotlight.config.schema import RunConfig
from spotlight.data.datasets import load_prompts
from spotlight.data.media_size import media_size
from spotlight.dry_run.model_plan import ModelSizes, read_sizes
from spotlight.dry_run.run_plan import count_passes, text_tokens
from spotlight.store.run_estimate import RunPace
from spotlight_fleet.facts import gather

MFU_LEAST, MFU, MFU_MOST = 0.21, 0.4, 0.54
"""Measured on one H200: of a whole run with small batches, and of large ones (docs/howto/gpu-suite.md)."""
_START_S = 120.0
"""Assumed: reading the model, embedding the prompts."""
_OF_A_SAMPLE = re.compile(r"mod|norm|time|adaln|guidance|pooled", re.IGNORECASE)
_OF_TEXT = re.compile(r"add_|txt|context|text|caption|cap_|attn2\.to_[kv]|refiner", re.IGNORECASE)


def counted_pace(config: RunConfig, ranks: int, pictures: int) -> RunPace | None:
    """None: no card is here, its rate is not known, or the model's sizes are not.

    Raises:
        PromptFileError, ModelError: as the dry run.
    """
    from spotlight_kernels.measure.peak_rates import bfloat16_flop_s  # needs torch

    cards, sizes = gather().gpus, read_sizes(config)
    peak = bfloat16_flop_s(cards[0].name) if cards else None
    if peak is None or not isinstance(sizes, ModelSizes) or config.model.dtype != "bfloat16":
        return None
    tokens = text_tokens(config, load_prompts(config))
    return pace_of(config, ranks, pictures, sizes, tokens, peak, cards[0].name)


def pace_of(
    config: RunConfig,
    ranks: int,
    pictures: int,
    sizes: ModelSizes,
    text: int,
    peak_flop_s: float,
    card: str,
) -> RunPace:
    """On ``ranks`` cards of this rate; decoding and rewards are not counted.

    Args:
        pictures: of an evaluation.
        text: tokens of a prompt.
    """
    passes = count_passes(config, pictures)
    flop = forward_flop(sizes, config, text)
    rate = ranks * peak_flop_s * MFU
    # What is computed again takes time, too. Frozen weights have no gradient.
    iteration = passes.forwards + passes.backward * (2 if config.learner.mode == "full" else 1)
    return RunPace(
        start_s=_START_S,
        iteration_s=iteration * flop / rate,
        evaluation_s=passes.evaluation * flop / rate,
        usd_s=ranks * config.fleet.price_usd_h / 3600,
        least=MFU / MFU_MOST,
        most=MFU / MFU_LEAST,
        rests_on=f"formulas: {iteration * flop:.2g} operations an iteration, {ranks} x {card} at {MFU:.0%} "
        f"({MFU_LEAST:.0%} to {MFU_MOST:.0%}) of its rate; decoding and rewards are not counted",
    )


def forward_flop(sizes: ModelSizes, config: RunConfig, text: int) -> float:
    """Operations of a forward of one sample: products, by the tokens that a layer sees, and attention."""
    image = sizes.tokens(media_size(config.rollout))
    products = sum(
        2.0 * outputs * inputs * _seen(name, image, text) for name, (outputs, inputs) in sizes.linears.items()
    )
    return products + 4.0 * (image + text) ** 2 * sizes.dimensions.width * sizes.dimensions.layers


def _seen(layer: str, image: int, text: int) -> int:
    if _OF_A_SAMPLE.search(layer):
        return 1
    return text if _OF_TEXT.search(layer) else image
