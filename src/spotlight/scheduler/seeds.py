"""Every random decision, as a pure function of names and numbers.

Nothing in the core draws from a generator with hidden state: prompts' order and rollouts' seeds are
hashes of (run seed, what they are for), so they do not depend on timing, workers or restarts.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence

from spotlight.scheduler.types import Prompt


def derive_seed(run_seed: int, *fields: str | int) -> int:
    """A 63-bit seed for the purpose that ``fields`` name; equal inputs give equal seeds everywhere."""
    text = "\x1f".join([str(run_seed), *map(str, fields)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def prompts_of_iteration(
    prompts: Sequence[Prompt], run_seed: int, iteration: int, count: int
) -> list[Prompt]:
    """The ``count`` prompts of an iteration: passes over all prompts, each pass in an order of its own.

    With fewer prompts than ``count`` an iteration holds a prompt more than once (separate groups).
    """
    chosen: list[Prompt] = []
    position = iteration * count
    while len(chosen) < count:
        epoch, offset = divmod(position, len(prompts))
        order = _epoch_order(prompts, run_seed, epoch)
        taken = order[offset : offset + count - len(chosen)]
        chosen += taken
        position += len(taken)
    return chosen


def spares_of_iteration(
    prompts: Sequence[Prompt], run_seed: int, iteration: int, planned: Sequence[Prompt], count: int
) -> list[Prompt]:
    """The prompts, at most ``count``, that may take the places of planned ones; in an order of their own."""
    taken = {prompt.id for prompt in planned}
    left = [prompt for prompt in prompts if prompt.id not in taken]
    return heapq.nsmallest(count, left, key=lambda one: derive_seed(run_seed, "spare", iteration, one.id))


def _epoch_order(prompts: Sequence[Prompt], run_seed: int, epoch: int) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: derive_seed(run_seed, "order", epoch, prompt.id))
