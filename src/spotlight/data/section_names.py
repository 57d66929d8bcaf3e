"""Errors of rooms that know no configuration, told with the full name of the key.

Such a room begins its message with the setting's own name (``height is 33; expected ...``): the last part of
the key. Who calls it with a configured value knows the section.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spotlight.data.prompt_files import PromptFileError
from spotlight.models.model_errors import ModelError


@contextmanager
def under(section: str) -> Iterator[None]:
    """Put ``section.`` before the message of an error: ``rollout.height is 33; expected ...``.

    Only around calls whose every ModelError and PromptFileError begins with the name of a setting.
    """
    try:
        yield
    except (ModelError, PromptFileError) as error:
        raise type(error)(f"{section}.{error}") from error
