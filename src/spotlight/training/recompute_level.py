"""How little is computed again in the memory there is (``learner.recompute: auto``).

Levels of a model of L blocks: at 0 all blocks are computed again, at L all keep their products, at 2 L
nothing is computed again; between them some blocks, evenly spread, are a step ahead of the others. A level
more costs one block's memory, so a pass's peak is affine in the level from 0 to L, and from L to 2 L.

A climb begins at 0, and goes up by as many levels as must fit: a block keeps no more than the whole pass at
level 0 needs, and as soon as two levels are measured, as much as their difference says. It ends at a level
that has run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotlight.training.recompute import Mode


def modes_at(level: int, blocks: int) -> list[Mode]:
    """Of each block."""
    steps: tuple[Mode, ...] = ("blocks", "elementwise", "none")
    low, high = steps[:2] if level < blocks else steps[1:]
    ahead = level if level < blocks else level - blocks
    return [high if i * ahead % blocks < ahead else low for i in range(blocks)]


@dataclass(frozen=True, slots=True)
class Climb:
    """Passes of one shape.

    Attributes:
        peaks: (level, bytes) of those that ran, levels rising.
        ceiling: the highest level not known to need more than there is.
    """

    blocks: int
    ceiling: int
    peaks: tuple[tuple[int, int], ...] = ()

    @property
    def level(self) -> int:
        """The last that ran; -1: none did."""
        return self.peaks[-1][0] if self.peaks else -1

    def next(self, budget_bytes: float) -> int:
        """The highest level known to fit; at the end, the last that ran."""
        if not self.peaks:
            return 0
        level, used = self.peaks[-1]
        begin = 0 if level < self.blocks else self.blocks
        first, needed = next(peak for peak in self.peaks if peak[0] >= begin)
        cost = (used - needed) / (level - first) if level > first else self.peaks[0][1]
        higher = level + int((budget_bytes - used) / max(cost, 1))
        return max(level, min(higher, begin + self.blocks, self.ceiling))

    def after(self, level: int, peak_bytes: int | None) -> Climb:
        """With one more pass. None: it ran out of memory."""
        if peak_bytes is None:
            return replace(self, ceiling=(self.level + level) // 2)
        return replace(self, peaks=(*self.peaks, (level, peak_bytes)))
