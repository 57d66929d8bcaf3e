"""What several commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotlight_rewards.base.prompts import Prompt


def silence_loading_bars() -> None:
    """Hide the progress bars of model-loading libraries, which would garble ours."""
    os.environ.setdefault("TQDM_DISABLE", "1")


def read_prompts_option(option: str, path: Path, files: Sequence[str] = ()) -> list[Prompt]:
    """The prompts of the file that an option names; ``files``: :class:`Columns`. Raises PromptFileError."""
    from spotlight_rewards.base import prompt_files
    from spotlight_rewards.base.prompt_datasets import Columns

    try:
        text = prompt_files.read_text(path, columns=Columns(files=tuple(files)))
    except (OSError, ValueError) as error:
        said = f"{option} {path} cannot be read ({error}); expected a prompts file"
        raise prompt_files.PromptFileError(said) from error
    return prompt_files.with_found_pictures(prompt_files.parse_prompts(text, str(path)), str(path))
