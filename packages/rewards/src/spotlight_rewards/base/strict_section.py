"""Base class of all configuration sections."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict


class WhenResumed(Enum):
    """Whether a key may change when a run goes on, written beside its type: ``Annotated[float, COURSE]``.

    On a section: for all of its keys that do not say otherwise. A key that says nothing changes in a fork.
    """

    WORK = "how the work is done: by any command, since results stay, up to rounding"
    EXTENT = "how long, and what is kept of it: by any command; recorded"
    COURSE = "what is learned or measured: by a command that names the run; recorded"
    STATE = "what the saved weights are of: in no run that goes on from them"


WORK, EXTENT, COURSE, STATE = WhenResumed


class StrictSection(BaseModel):
    """Strict and immutable: unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
