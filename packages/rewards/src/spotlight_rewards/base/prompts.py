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
        found = self.metadata.get("references", ())
        return tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()
