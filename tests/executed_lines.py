"""How much work a function does, counted rather than timed: the same on an idle machine and on a busy one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def executed_lines(work: Callable[[], object]) -> int:
    """Lines of Python that `work` executes in this thread; a loop on one line counts once a round.

    What C functions do inside counts as nothing.
    """
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines
