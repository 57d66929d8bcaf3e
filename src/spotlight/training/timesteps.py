"""How many timesteps of a micro-batch share one forward and backward (timestep parallelism).

K timesteps of B samples form a batch of K B rows. This changes the gradient by rounding only, gathers sharded
parameters once instead of K times, and needs activations for K B rows. K is a pure function of measured
passes and available memory.

Invariants:
- A pass exceeds neither the bound from measurements nor half the tokens of one that did not fit; one timestep
  is always allowed.
- Bounds hold for memory affine in the rows and at most quadratic in the tokens per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

MARGIN = 0.9
"""Share of the free memory for passes: allocators round up and fragment."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the memory of one timestep of a micro-batch depends on.

    Attributes:
        samples: on this rank.
        tokens: of an image plus the longest text.
    """

    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Trial:
    """A pass that was run. ``bytes``: peak above the memory held before; None: it did not fit."""

    tokens: int
    rows: int
    bytes: int | None


def cut_timesteps(timesteps: range, per_pass: int) -> list[range]:
    """The fewest consecutive parts of at most ``per_pass``, as even as possible.

    Raises:
        ValueError: ``per_pass`` is below 1.
    """
    if per_pass < 1:
        raise ValueError(f"timesteps_per_pass is {per_pass}; expected at least 1")
    count = -(-len(timesteps) // per_pass)
    edges = [timesteps.start + len(timesteps) * i // max(count, 1) for i in range(count + 1)]
    return [range(left, right) for left, right in pairwise(edges)]


def largest_pass(timesteps: int, per_pass: int) -> int:
    """Timesteps in the largest part of :func:`cut_timesteps`."""
    return -(-timesteps // -(-timesteps // per_pass))


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Measured memory use of passes."""

    trials: tuple[Trial, ...] = ()

    def after(self, trial: Trial) -> PassMemory:
        """With one more trial."""
        return PassMemory((*self.trials, trial))

    def most(self, shape: Shape, timesteps: int, budget_bytes: float) -> int:
        """The largest useful K, 1 <= K <= timesteps, known to fit.

        Useful: no smaller K needs as few passes.
        """
        for per_pass in range(timesteps, 1, -1):
            if largest_pass(timesteps, per_pass) == per_pass and self._fits(shape, per_pass, budget_bytes):
                return per_pass
        return 1

    def proven(self, shape: Shape, per_pass: int) -> bool:
        """Whether a pass at least as large has run and fitted."""
        rows = shape.samples * per_pass
        return any(t.bytes is not None and t.tokens >= shape.tokens and t.rows >= rows for t in self.trials)

    def _fits(self, shape: Shape, per_pass: int, budget_bytes: float) -> bool:
        rows = shape.samples * per_pass
        for trial in self.trials:
            if trial.bytes is None and 2 * rows * shape.tokens > trial.rows * trial.tokens:
                return False
        return min(self._bounds(shape.tokens, rows), default=float("inf")) <= budget_bytes

    def _bounds(self, tokens: int, rows: int) -> Iterator[float]:
        measured: dict[int, dict[int, int]] = {}
        for trial in self.trials:
            if trial.bytes is not None:
                at = measured.setdefault(trial.tokens, {})
                at[trial.rows] = max(trial.bytes, at.get(trial.rows, 0))
        for tokens_then, at in measured.items():
            longer = max(tokens / tokens_then, 1.0) ** 2
            for rows_then, needed in at.items():
                yield needed * max(rows / rows_then, 1.0) * longer
            if len(at) > 1:
                *_, (fewer, less), (more, needed) = sorted(at.items())
                slope = max((needed - less) / (more - fewer), 0.0)
                yield (needed + slope * max(rows - more, 0)) * longer
