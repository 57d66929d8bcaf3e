"""The picture that a prompt is about, for rewards that compare samples with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from spotlight_rewards.base.files import at_home
from spotlight_rewards.base.media_files import read_upright
from spotlight_rewards.reward import Image, RewardInputError


def original_of(reward: str, prompt: str, record: Mapping[str, Any], field: str | None = None) -> Image:
    """The picture that a prompt's metadata names: [height, width, 3]. Raises RewardInputError.

    Args:
        reward: whose words the error is.
        field: the metadata field; None: ``references``, else ``reference``.
    """
    name = field or next((each for each in ("references", "reference") if each in record), "references")
    found = record.get(name)
    path = found[0] if isinstance(found, list) and found else found
    if not isinstance(path, str) or not path:
        raise RewardInputError(
            f"{reward} reward: {name!r} of the prompt {prompt!r} is {found!r}; expected the path of the "
            "picture that it is about. Add it to its line of the prompts file"
            + (", or name another field in params.reference." if reward == "edit-score" else ".")
        )
    try:
        return _opened(path)
    except (OSError, ValueError) as error:
        raise RewardInputError(
            f"{reward} reward: {name!r} of the prompt {prompt!r} is {path!r}, which cannot be read as a "
            f"picture ({type(error).__name__}: {error}); expected one, by its absolute path or from "
            f"{Path.cwd()}."
        ) from error


@lru_cache(maxsize=32)  # the members of groups share theirs; one of 2048 x 2048 pixels takes 13 MB
def _opened(path: str) -> Image:
    return np.asarray(read_upright(at_home(path)))
