"""Prefix errors of configuration-free code with the configuration section.

Such code begins its messages with the setting's own name (``height is 33; expected ...``), the last part of
the key. Callers that pass configured values know the section.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spotlight.data.prompt_files import PromptFileError
from spotlight.models.model_errors import ModelError


@contextmanager
def under(section: str) -> Iterator[None]:
    """Prefix errors with ``section.``: ``rollout.height is 33; expected ...``.

    Use it only around calls whose every ModelError and PromptFileError begins with a setting's name.
    """
    try:
        yield
    except (ModelError, PromptFileError) as error:
        raise type(error)(f"{section}.{error}") from error
