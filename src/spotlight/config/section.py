"""Base class of all configuration sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from spotlight.config.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


class Section(BaseModel):
    """A strict, immutable part of the configuration."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Conflicts within this section or with others of ``run``; none unless overridden."""
        yield from ()

    def notes(self, run: RunConfig) -> Iterator[str]:
        """What is valid, but may not be what was meant; nothing unless overridden."""
        yield from ()
