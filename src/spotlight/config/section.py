"""Base class of all configuration sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spotlight_rewards.base.errors import Problem
from spotlight_rewards.base.strict_section import StrictSection

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


class Section(StrictSection):
    """A part of the configuration that can speak about the others."""

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Conflicts within this section or with others of ``run``; none unless overridden."""
        yield from ()

    def notes(self, run: RunConfig) -> Iterator[str]:
        """What is valid, but may not be what was meant; nothing unless overridden."""
        yield from ()
