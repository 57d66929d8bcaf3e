"""Options shared by several commands."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

if TYPE_CHECKING:
    from spotlight.models.slots import Slot


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
