"""Base class of all configuration sections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic_core import PydanticCustomError

from spotlight.config.requires import Requirement
from spotlight_rewards.base.strict_section import StrictSection

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
RUN_NAME_IS = "letters, digits and any of . _ -, the first a letter or digit"


class Section(StrictSection):
    """A part of the configuration that can speak about the others."""

    requires: ClassVar[Sequence[Requirement[RunConfig]]] = ()
    """Contradictions within this section, or with others of a run; a subclass adds its own to these."""

    @classmethod
    def requirements(cls) -> Iterator[Requirement[RunConfig]]:
        """The rows of this class and of those it is derived from."""
        for base in reversed(cls.__mro__):
            yield from base.__dict__.get("requires", ())

    def sections(self) -> Iterator[Section]:
        yield self
        for name in type(self).model_fields:
            value = getattr(self, name)
            for section in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(section, Section):
                    yield from section.sections()

    def notes(self, run: RunConfig) -> Iterator[str]:
        """What is valid, but may not be what was meant; nothing unless overridden.

        Sections within it are asked for theirs.
        """
        yield from ()


STATED = "stated"
"""Type of an error of validation that says all of its message itself."""


def stated(found: str, expected: str, remedy: str) -> PydanticCustomError:
    """What a validator raises, where only it knows what to do."""
    return PydanticCustomError(STATED, "{expected}", {"found": found, "expected": expected, "remedy": remedy})
