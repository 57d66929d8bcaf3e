"""Configuration of checkpoints and curves."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt

from spotlight.config.section import Section
from spotlight.registry import SINKS
from spotlight_rewards.base.strict_section import WORK

_OTHERS = SINKS.known(without=("tensorboard", "wandb"))


class CheckpointConfig(Section):
    """When a run writes checkpoints."""

    every: PositiveInt = 1
    """Iterations between checkpoints; a killed run loses at most this much."""
    keep: PositiveInt = 2
    """Checkpoints to keep; an older one is used if the newest is damaged."""
    best: bool = True
    """Also keep the checkpoint with the best validation (``strict`` if there is one, else ``graded``)."""


class WandbConfig(Section):
    """Weights & Biases (extra ``wandb``)."""

    project: str = "spotlight"
    """Project to log to."""
    entity: str | None = None
    """Team or user."""


class MetricsConfig(Section):
    """Where curves are written, besides ``metrics.jsonl``."""

    tensorboard: Annotated[bool, WORK] = True
    """Write TensorBoard event files into the run directory."""
    wandb: Annotated[WandbConfig | None, WORK] = None
    """Also log to Weights & Biases."""
    sinks: Annotated[dict[Annotated[str, AfterValidator(_OTHERS)], dict[str, Any]], WORK] = {}  # noqa: RUF012 - pydantic copies
    """Further trackers by registered name, each with its options (``trackio: {project: spotlight}``)."""
    training_pictures_every: Annotated[int, Field(ge=0), WORK] = 10
    """Iterations between those that keep training pictures, the best and worst of four groups; 0: none."""

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        return {
            **({"tensorboard": {}} if self.tensorboard else {}),
            **({"wandb": self.wandb.model_dump()} if self.wandb else {}),
            **self.sinks,
        }
