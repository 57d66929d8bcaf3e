"""Every random decision, as a pure function of names and numbers.

There is no generator state: prompt order and rollout seeds are hashes of the run seed and their purpose,
independent of timing, workers and restarts.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from spotlight_rewards.base.prompts import Prompt, PromptId


def derive_seed(run_seed: int, *fields: str | int) -> int:
    """A reproducible 63-bit seed for the purpose named by ``fields``."""
    text = "\x1f".join([str(run_seed), *map(str, fields)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def prompts_of_iteration(
    prompts: Sequence[Prompt], run_seed: int, iteration: int, count: int
) -> list[Prompt]:
    """An iteration's ``count`` prompts, from passes over all prompts, each in its own order.

    None comes twice, also where one pass ends and the next begins; only with fewer prompts than ``count``
    they repeat, as separate groups.
    """
    chosen: list[Prompt] = []
    position = iteration * count
    while len(chosen) < count:
        epoch, offset = divmod(position, len(prompts))
        moved = offset < count  # further back it stays as hashed: half the work
        order = _epoch_order(prompts, run_seed, epoch, count) if moved else _by_hash(prompts, run_seed, epoch)
        taken = order[offset : offset + count - len(chosen)]
        chosen += taken
        position += len(taken)
    return chosen


def spares_of_iteration(
    prompts: Sequence[Prompt], run_seed: int, iteration: int, planned: Sequence[Prompt], count: int
) -> list[Prompt]:
    """At most ``count`` prompts, in pseudorandom order, that may replace planned ones."""
    taken = {prompt.id for prompt in planned}
    left = [prompt for prompt in prompts if prompt.id not in taken]
    return heapq.nsmallest(count, left, key=lambda one: derive_seed(run_seed, "spare", iteration, one.id))


def _epoch_order(prompts: Sequence[Prompt], run_seed: int, epoch: int, count: int) -> list[Prompt]:
    """A pass's order: by hash, but what the pass before gave to the iteration that both share stands behind
    what this pass gives to it.
    """
    total = len(prompts)
    first = max(0, epoch - 1)
    if total < 2 * count:  # what moves may be what the next pass looks at: from a pass that starts afresh
        first = epoch - epoch % (count // math.gcd(total, count))
    order = _by_hash(prompts, run_seed, first)
    for each in range(first + 1, epoch + 1):
        shared = each * total % count
        given = {prompt.id for prompt in order[total - shared :]} if total >= count else set()
        order = _by_hash(prompts, run_seed, each)
        order[:count] = sorted(order[:count], key=lambda prompt: prompt.id in given)
    return order


def _by_hash(prompts: Sequence[Prompt], run_seed: int, epoch: int) -> list[Prompt]:
    return [prompts[index] for index in _hashed(tuple(prompt.id for prompt in prompts), run_seed, epoch)]


@lru_cache(maxsize=8)  # of many prompts, a pass is cut into hundreds of iterations; of few it takes no time
def _hashed(ids: tuple[PromptId, ...], run_seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(sorted(range(len(ids)), key=lambda index: derive_seed(run_seed, "order", epoch, ids[index])))
