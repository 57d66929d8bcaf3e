"""What sets of prompts have in common: an order drawn by hashing, and a split without shared content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from spotlight_rewards.base.errors import UserError

T = TypeVar("T", bound=Hashable)

_HELD_OUT_PART = 4
"""A group's held-out contents are at most one in so many."""


class PromptSetError(UserError, ValueError):
    """A set of prompts that cannot be made; names what was asked for and the most there is."""


@dataclass(frozen=True, slots=True)
class PromptSet(Generic[T]):
    """Contents and wordings of the two sets; no content is in both.

    Attributes:
        train: (content, number of its wording), in the order to be written.
        held_out: likewise.
    """

    train: tuple[tuple[T, int], ...]
    held_out: tuple[tuple[T, int], ...]


def drawn(*what: object) -> int:
    """A number of 64 bits that depends on nothing else, on no machine or version of Python."""
    return _hashed(repr(what))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def split(
    groups: Mapping[str, Iterable[T]],
    *,
    train: int,
    held_out: int,
    seed: int,
    wordings: Callable[[T], int],
    without: frozenset[T] = frozenset(),
) -> PromptSet[T]:
    """Draw both sets, with groups of equal size as far as each has enough.

    A held-out content has one wording. Training takes further wordings of a content only after all contents
    of its group have one.

    Args:
        groups: all contents, by group.
        wordings: how many different texts a content has.
        without: contents that neither set may have.

    Raises:
        PromptSetError: there are fewer than asked for.
    """
    order = {group: _shuffled(contents, (seed, group), without) for group, contents in groups.items()}
    kept = _shares(
        {group: len(each) // _HELD_OUT_PART for group, each in order.items()}, held_out, "held-out"
    )
    aside = [(each, _first(seed, each, wordings)) for group, n in kept.items() for each in order[group][:n]]
    left = {group: contents[kept[group] :] for group, contents in order.items()}
    texts = {group: sum(map(wordings, contents)) for group, contents in left.items()}
    taken = _shares(texts, train, "training")
    chosen = [
        (each, (_first(seed, each, wordings) + turn) % wordings(each))
        for group, number in taken.items()
        for turn, each in islice(_in_turns(left[group], wordings), number)
    ]
    return PromptSet(_mixed(chosen, seed), _mixed(aside, seed))


def _shuffled(contents: Iterable[T], key: Hashable, without: frozenset[T]) -> list[T]:
    listed, name = list(contents), repr(key)
    # As drawn(key, index); the key is the same for 300,000 indices.
    order = sorted(range(len(listed)), key=lambda index: _hashed(f"({name}, {index})"))
    shuffled = [listed[index] for index in order]
    return [each for each in shuffled if each not in without] if without else shuffled


def _in_turns(contents: Sequence[T], wordings: Callable[[T], int]) -> Iterator[tuple[int, T]]:
    """Every content once, then those that have a second wording, and so on."""
    turn = 0
    while contents := [each for each in contents if turn < wordings(each)]:
        yield from ((turn, each) for each in contents)
        turn += 1


def _first(seed: int, content: T, wordings: Callable[[T], int]) -> int:
    return drawn(seed, "wording", content) % wordings(content)


def _mixed(texts: Sequence[tuple[T, int]], seed: int) -> tuple[tuple[T, int], ...]:
    return tuple(sorted(texts, key=lambda text: drawn(seed, "order", text)))


def _shares(sizes: Mapping[str, int], total: int, what: str) -> dict[str, int]:
    """As equal as the sizes allow, the sum being ``total``."""
    if total > sum(sizes.values()):
        raise PromptSetError(
            f"{total:,} {what} prompts are asked for; there are at most {sum(sizes.values()):,}. "
            "Ask for fewer."
        )
    shares = dict.fromkeys(sizes, 0)
    left = total
    while left:
        open_groups = [group for group in sizes if shares[group] < sizes[group]]
        each = max(left // len(open_groups), 1)
        for group in open_groups:
            more = min(each, sizes[group] - shares[group], left)
            shares[group] += more
            left -= more
    return shares
