"""What a picture is asked for by, and what its rewards know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

PromptId = NewType("PromptId", str)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, with the metadata its reward needs."""

    id: PromptId
    text: str
    metadata: Mapping[str, object]

    @property
    def references(self) -> tuple[str, ...]:
        """Paths of the pictures that the prompt is about (metadata ``references``)."""
        return self.paths("references")

    @property
    def pictures(self) -> tuple[str, ...]:
        """Paths of pictures of it to train on, the best first (metadata ``pictures``)."""
        return self.paths("pictures")

    def paths(self, key: str) -> tuple[str, ...]:
        """The paths that the metadata has under ``key``."""
        found = self.metadata.get(key, ())
        return tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()
