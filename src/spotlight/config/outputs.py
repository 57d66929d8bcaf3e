"""What a run leaves behind: checkpoints and curves."""

from __future__ import annotations

from pydantic import PositiveInt

from spotlight.config.section import Section


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
