"""What ``spotlight doctor --gpu`` measured, and what a whole model costs by what few blocks cost.

Pure, and free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DENOISING = "denoising"
UPDATE = "update, recompute {}"
ROWS_MAX = 1024
"""Larger batches are not looked for."""


@dataclass(frozen=True, slots=True)
class CardRates:
    """One card.

    Attributes:
        product_flop_s: of a large bfloat16 product, measured.
        copy_bytes_s: of a large copy on the card, read and written bytes counted, measured.
        peak_flop_s: bfloat16, by the data sheet; None: not known for this card.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    product_flop_s: float
    copy_bytes_s: float
    peak_flop_s: float | None


@dataclass(frozen=True, slots=True)
class PassTime:
    """A pass through a model of some depth.

    Attributes:
        rows: samples of it, pictures or videos.
        seconds: None: it did not fit.
        flops: of the model, as ``train/mfu`` counts them; None: they cannot be counted.
    """

    rows: int
    seconds: float | None
    flops: float | None


@dataclass(frozen=True, slots=True)
class FewBlocks:
    """What was timed with one number of blocks of each kind.

    Attributes:
        depth: blocks by kind.
        passes: by :data:`DENOISING` and :data:`UPDATE`.
        fused: how many blocks of each class run fused operators.
        reference: classes of blocks that run diffusers' operators, and why.
    """

    depth: Mapping[str, int]
    passes: Mapping[str, PassTime]
    fused: Mapping[str, int]
    reference: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WholePass:
    """A pass through the whole model, extrapolated.

    Attributes:
        seconds: None: it did not fit, or the times of few and of more blocks do not differ enough.
        mfu: model FLOP utilisation; None: where seconds, operations or the card's peak are not known.
    """

    name: str
    rows: int
    seconds: float | None
    flops: float | None
    mfu: float | None


@dataclass(frozen=True, slots=True)
class FittingBatch:
    """The largest batch that fits by the memory plan.

    Attributes:
        rows: 0: not even one does.
        peak_bytes: with so many, or with one.
    """

    what: str
    rows: int
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Link:
    """An all-reduce between all cards.

    Attributes:
        bus_bytes_s: bytes that each card sends a second; None: it failed, and ``trouble`` says why.
    """

    cards: int
    size_bytes: int
    bus_bytes_s: float | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """All of it, as the JSON file has it.

    Attributes:
        versions: of what the figures depend on.
        link: None: there is one card.
        attention: values of ``model.attention`` that work here.
        depth: of the whole model, blocks by kind.
        passes: of the whole model.
        measured: what they are extrapolated from.
    """

    utc: str
    versions: Mapping[str, str]
    cards: Sequence[CardRates]
    link: Link | None
    attention: Sequence[str]
    family: str
    model: str
    size: str
    text_tokens: int
    lora_rank: int
    depth: Mapping[str, int]
    passes: Sequence[WholePass]
    measured: Sequence[FewBlocks]
    fits: Sequence[FittingBatch]


def named(depth: Mapping[str, int]) -> str:
    """``num_layers=2, num_single_layers=6``."""
    return ", ".join(f"{kind}={number}" for kind, number in depth.items())


def depths_to_time(depth: Mapping[str, int], few: int, more: int) -> list[dict[str, int]]:
    """``few`` blocks of every kind; then, for each kind that has more, ``more`` of it beside few others."""
    base = {kind: min(few, whole) for kind, whole in depth.items()}
    deeper = ({**base, kind: min(more, whole)} for kind, whole in depth.items() if whole > few)
    return [base, *deeper]


def whole_cost(
    base: float, deeper: Sequence[float], depths: Sequence[Mapping[str, int]], depth: Mapping[str, int]
) -> float | None:
    """A cost of the whole model from those of :func:`depths_to_time`; exact for what grows evenly by block.

    None if some kind of block costs nothing: what was timed is noise then.
    """
    first, whole = depths[0], base
    for cost, blocks in zip(deeper, depths[1:], strict=True):
        (kind,) = (kind for kind in blocks if blocks[kind] != first[kind])
        a_block = (cost - base) / (blocks[kind] - first[kind])
        if a_block <= 0:
            return None
        whole += a_block * (depth[kind] - first[kind])
    return whole


def whole_passes(
    measured: Sequence[FewBlocks], depth: Mapping[str, int], peak_flop_s: float | None
) -> list[WholePass]:
    """Every pass at the model's depth."""
    made = []
    for name, first in measured[0].passes.items():
        each = [few.passes[name] for few in measured]
        depths = [few.depth for few in measured]
        seconds, flops = (
            whole_cost(known[0], known[1:], depths, depth) if len(known) == len(each) else None
            for known in (
                [one.seconds for one in each if one.seconds is not None],
                [one.flops for one in each if one.flops is not None],
            )
        )
        known = seconds is not None and flops is not None and peak_flop_s is not None
        mfu = flops / seconds / peak_flop_s if known else None  # type: ignore[operator]
        made.append(WholePass(name, first.rows, seconds, flops, mfu))
    return made
