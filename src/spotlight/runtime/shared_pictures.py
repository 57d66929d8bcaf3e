"""Pictures that are made on one rank and needed on another travel as text; all ranks must call these."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping

import numpy as np

from spotlight.runtime.recorder import Picture
from spotlight.scheduler.types import RolloutId
from spotlight.training.sharding import Ranks
from spotlight_rewards.pool.waiting import SampleGroup


def everyones(pictures: Mapping[RolloutId, Picture], ranks: Ranks) -> dict[RolloutId, Picture]:
    """Those of all ranks."""
    shares = ranks.share({name: encoded(picture) for name, picture in pictures.items()})
    return {name: _decoded(text) for share in shares for name, text in share.items()}


def whole_groups(
    pictures: Mapping[RolloutId, Picture], groups: Mapping[RolloutId, SampleGroup], ranks: Ranks, turn: int
) -> dict[RolloutId, Picture]:
    """Those of this rank's groups, made on any rank; ranks take the groups in turn, rank ``turn`` first."""
    owner = {group: (turn + at) % ranks.world for at, group in enumerate(dict.fromkeys(groups.values()))}
    here = dict(pictures)
    for group, rank in owner.items():  # one at a time, for the memory of their copies
        leaving = [name for name in pictures if groups[name] == group] if rank != ranks.rank else []
        for share in ranks.share({name: encoded(pictures[name]) for name in leaving}):
            if rank == ranks.rank:
                here |= {name: _decoded(text) for name, text in share.items()}
    mine = [name for name, group in groups.items() if owner[group] == ranks.rank and name in here]
    return {name: here[name] for name in mine}


def encoded(picture: Picture) -> str:
    """Shape and bytes."""
    return f"{'x'.join(map(str, picture.shape))}:{b64encode(picture.tobytes()).decode()}"


def _decoded(text: str) -> Picture:
    size, _, content = text.partition(":")
    return np.frombuffer(bytearray(b64decode(content)), np.uint8).reshape(*map(int, size.split("x")))
