"""Prefix errors of configuration-free code with the configuration section.

Such code begins messages with a setting's own name (``height is 33; expected ...``); callers know the
section.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.prompt_files import PromptFileError


@contextmanager
def under(section: str) -> Iterator[None]:
    """Prefix errors with ``section.``: ``rollout.height is 33; expected ...``.

    Every ModelError and PromptFileError of the block must begin with a setting's name.
    """
    try:
        yield
    except (ModelError, PromptFileError) as error:
        raise type(error)(f"{section}.{error}") from error
