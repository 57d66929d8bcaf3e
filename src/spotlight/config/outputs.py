"""What a run leaves behind: checkpoints and curves."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, PositiveInt

from spotlight.config.section import Section
from spotlight.registry import SINKS

_OTHERS = SINKS.known(without=("tensorboard", "wandb"))


class CheckpointConfig(Section):
    """When a run commits."""

    every: PositiveInt = 1
    """Iterations between checkpoints; a kill loses at most this much."""
    keep: PositiveInt = 2
    """Checkpoints kept; the older one serves when the newest is damaged."""


class WandbConfig(Section):
    """Weights & Biases (extra ``wandb``)."""

    project: str = "spotlight"
    """Project to log to."""
    entity: str | None = None
    """Team or user."""


class MetricsConfig(Section):
    """Where curves go besides ``metrics.jsonl``."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases."""
    sinks: dict[Annotated[str, AfterValidator(_OTHERS)], dict[str, Any]] = {}  # noqa: RUF012 - pydantic copies
    """Further trackers by their registered name, each with its options (``mlflow: {uri: ...}``)."""

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """Every sink that is written, with its options."""
        return {
            **({"tensorboard": {}} if self.tensorboard else {}),
            **({"wandb": self.wandb.model_dump()} if self.wandb else {}),
            **self.sinks,
        }
