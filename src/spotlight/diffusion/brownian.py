"""Previews on a rollout's own noise path: the noise of T steps derived from that of S > T steps.

A seed fixes a rollout's initial noise and the kick (standard normal noise) of each step. Previews share the
initial noise; their kicks are weighted sums of the rollout's:

- SDE time is the noise level. Kick e_j of a step of length d_j is the Brownian increment sqrt(d_j) e_j; a
  longer step's increment is the sum of those within it. A preview boundary inside a fine step splits its
  increment by a Brownian bridge with an extra draw: the pieces are independent and sum to it.
- CPS is no SDE (each step replaces a share of the noise, whatever its length), but on Gaussian data the same
  sums serve it about as well as weights tailored to it.
- The ODE has no kicks.

Invariants
    1. Coarse kicks of a seed are independent and standard normal.
    2. With T = S they equal the fine ones.
    3. They are pure functions of seed and schedules, bit-exact everywhere (float64 sums in fixed order).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from spotlight.diffusion.noise import Stream, counter_of_step, normal_batch

_SAME = 1e-6
"""Noise levels closer than this are equal: schedules are float32."""


@dataclass(frozen=True, slots=True, order=True)
class Draw:
    """A standard normal draw of a seed."""

    stream: Stream
    index: int


Kick: TypeAlias = tuple[tuple[Draw, float], ...]
"""Weighted draws; the squared weights sum to 1."""


def coarse_kicks(fine: Sequence[float], coarse: Sequence[float]) -> tuple[Kick, ...]:
    """Each coarse step's kick, in terms of the fine steps' draws.

    Args:
        fine: noise levels of the rollout, descending, [S + 1].
        coarse: of the preview, [T + 1], with the same ends.

    Raises:
        ValueError: levels do not descend, or the ends differ.
    """
    for name, levels in (("rollout", fine), ("preview", coarse)):
        if len(levels) < 2 or any(after >= before for before, after in pairwise(levels)):
            raise ValueError(
                f"noise levels of the {name} are {list(levels)}; expected at least 2, descending"
            )
    if abs(fine[0] - coarse[0]) > _SAME or abs(fine[-1] - coarse[-1]) > _SAME:
        raise ValueError(
            f"the preview goes from noise level {coarse[0]} to {coarse[-1]}, the rollout from {fine[0]} to "
            f"{fine[-1]}; expected the same ends"
        )
    return _increments(fine, coarse)


def coarse_window(window: range, fine: Sequence[float], coarse: Sequence[float]) -> range:
    """The preview's stochastic steps: those at least half covered by the rollout's window.

    At least one (the most covered), but never the last step, which is ODE.
    """
    high, low = fine[window.start], fine[window.stop]
    covered = [
        max(0.0, min(high, before) - max(low, after)) / (before - after)
        for before, after in pairwise(coarse[:-1])
    ]
    if not window or not covered:
        return range(0)
    inside = [step for step, share in enumerate(covered) if share >= 0.5 - _SAME]
    if not inside:
        inside = [max(range(len(covered)), key=covered.__getitem__)]
    return range(inside[0], inside[-1] + 1)


def kick_batch(
    seeds: Sequence[int], kicks: Sequence[Kick], shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Row i is seed i's kick i: [batch, *shape] float32 on ``device``."""
    rows = np.zeros((len(seeds), math.prod(shape)), dtype=np.float64)
    for stream in (Stream.ROLLOUT_NOISE, Stream.PREVIEW_NOISE):  # the draws' order within a kick
        terms = [
            (row, draw.index, weight)
            for row, kick in enumerate(kicks)
            for draw, weight in kick
            if draw.stream is stream
        ]
        if terms:
            indices = [index for _, index, _ in terms]
            drawn = normal_batch([seeds[row] for row, _, _ in terms], stream, indices, (rows.shape[1],))
            for (row, _, weight), values in zip(terms, drawn.numpy(), strict=True):
                rows[row] += weight * values.astype(np.float64)
    return torch.from_numpy(rows.astype(np.float32)).view(len(seeds), *shape).to(device)


def fine_draw(step: int) -> Draw:
    """The kick of a rollout's own step."""
    return Draw(Stream.ROLLOUT_NOISE, counter_of_step(step))


def _increments(fine: Sequence[float], coarse: Sequence[float]) -> tuple[Kick, ...]:
    kicks: list[dict[Draw, float]] = [{} for _ in coarse[1:]]
    for step, (before, after) in enumerate(pairwise(fine)):
        cuts = [level for level in coarse[1:-1] if after + _SAME < level < before - _SAME]
        bounds = [before, *cuts, after]
        # The rest of the increment, as weighted draws; a bridge splits off one piece after the other.
        left, length = {fine_draw(step): math.sqrt(before - after)}, before - after
        for cut, (high, low) in enumerate(pairwise(bounds)):
            size = high - low
            if cut == len(cuts):
                piece = left
            else:
                share = size / length
                piece = {draw: share * weight for draw, weight in left.items()}
                piece[Draw(Stream.PREVIEW_NOISE, (step << 16) | cut)] = math.sqrt(size * (1 - share))
                left = {draw: left.get(draw, 0.0) - piece[draw] for draw in piece}
                length -= size
            target = kicks[_step_at(coarse, (high + low) / 2)]
            for draw, weight in piece.items():
                target[draw] = target.get(draw, 0.0) + weight
    return tuple(_normalised(kick) for kick in kicks)


def _step_at(levels: Sequence[float], level: float) -> int:
    for step, after in enumerate(levels[1:]):
        if level > after:
            return step
    return len(levels) - 2


def _normalised(kick: dict[Draw, float]) -> Kick:
    size = math.sqrt(math.fsum(weight * weight for weight in kick.values()))
    return tuple((draw, weight / size) for draw, weight in sorted(kick.items()) if weight)
