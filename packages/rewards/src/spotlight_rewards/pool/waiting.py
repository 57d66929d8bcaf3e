"""Which waiting samples a reward's next idle process takes. Pure.

Batches are formed from what waits, and never wait for more. A batch never splits a group whose members are to
be compared, and holds no other sample beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """A prompt's samples that belong together.

    Attributes:
        key: distinct among the groups that wait.
        size: how many were to be made; more than there are if some failed.
    """

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class _Queued(Generic[Item]):
    item: Item
    submission: int
    group: SampleGroup | None


@dataclass(slots=True)
class WaitingSamples(Generic[Item]):
    """The samples that wait for one reward, in order of arrival.

    Attributes:
        batch_size: most samples in a batch; None: no limit.
        merges: a batch may hold samples of several submissions. Then its composition depends on the time.
        by_group: a batch is one group.
    """

    batch_size: int | None
    merges: bool
    by_group: bool
    _entries: deque[_Queued[Item]] = field(default_factory=deque)
    _submissions: int = 0

    def put(self, items: Iterable[tuple[Item, SampleGroup]]) -> None:
        """Add the samples of one submission, which holds whole groups."""
        self._submissions += 1
        entries = [
            _Queued(item, self._submissions, group if self.by_group else None) for item, group in items
        ]
        if self.by_group:
            order = {key: at for at, key in enumerate(dict.fromkeys(_key(each) for each in entries))}
            entries.sort(key=lambda each: order[_key(each)])
        self._entries.extend(entries)

    def take(self) -> tuple[list[Item], SampleGroup | None]:
        """Remove the next batch, and its group if that is what it is; empty if none waits."""
        if not self._entries:
            return [], None
        first = self._entries[0]
        taken: list[Item] = []
        while self._entries and self._fits(first, self._entries[0], len(taken)):
            taken.append(self._entries.popleft().item)
        return taken, first.group

    def _fits(self, first: _Queued[Item], each: _Queued[Item], taken: int) -> bool:
        if first.group is not None:
            return each.group == first.group and each.submission == first.submission
        room = self.batch_size is None or taken < self.batch_size
        return room and (self.merges or each.submission == first.submission)


def _key(entry: _Queued[Item]) -> str:
    assert entry.group is not None
    return entry.group.key
