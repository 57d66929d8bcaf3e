"""Options shared by several commands."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

if TYPE_CHECKING:
    from spotlight.models.slots import Slot
    from spotlight.scheduler.types import Prompt


class Weights(StrEnum):
    """Which weights of a run to use."""

    POLICY = "policy"
    EMA = "ema"
    OLD = "old"
    REFERENCE = "reference"


class Device(StrEnum):
    """Where the model lives."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


WeightsOption: TypeAlias = Annotated[
    Weights | None,
    typer.Option(
        "--weights",
        help="Which weights (default: those the run judges by); reference: before training.",
        show_default=False,
    ),
]
DeviceOption: TypeAlias = Annotated[Device, typer.Option("--device", help="Where the model lives.")]


def slot_of(weights: Weights | None) -> Slot | None:
    """The weight slot that the option names."""
    return None if weights is None else weights.value


def device_of(device: Device) -> Literal["auto", "cpu", "cuda"]:
    """The device that the option names."""
    return device.value


def silence_loading_bars() -> None:
    """Hide the progress bars of model-loading libraries, which would garble ours."""
    os.environ.setdefault("TQDM_DISABLE", "1")


def read_prompts_option(option: str, path: Path) -> list[Prompt]:
    """The prompts of the file that an option names. Raises PromptFileError."""
    from spotlight.data.prompt_files import PromptFileError, parse_prompts, with_found_references

    try:
        return with_found_references(parse_prompts(path.read_text(), str(path)), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{option} {path} cannot be read ({error}); expected a prompts file") from error
