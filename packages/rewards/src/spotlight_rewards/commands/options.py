"""What several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotlight_rewards.base.prompts import Prompt


def silence_loading_bars() -> None:
    """Hide the progress bars of model-loading libraries, which would garble ours."""
    os.environ.setdefault("TQDM_DISABLE", "1")


def read_prompts_option(option: str, path: Path) -> list[Prompt]:
    """The prompts of the file that an option names. Raises PromptFileError."""
    from spotlight_rewards.base.prompt_files import PromptFileError, parse_prompts, with_found_references

    try:
        return with_found_references(parse_prompts(path.read_text(encoding="utf-8"), str(path)), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{option} {path} cannot be read ({error}); expected a prompts file") from error
