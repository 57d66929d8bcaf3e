"""The pipeline's part of the configuration: what of generation and training may overlap."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.section import Section


class PipelineConfig(Section):
    """What of generation and training may overlap; nothing by default. Each switch works alone."""

    axis: Literal["none", "prompt", "generation"] = "none"
    """Gradients accumulate while the rest is generated: of whole groups as they complete (``prompt``), or of
    slices of groups (``generation``). ``none``: when all samples are there."""
    slice_size: PositiveInt = 4
    """Samples of a group that form a slice. Unused without ``axis: generation``."""
    baseline: Literal["group", "slice", "exploration"] = "group"
    """What rewards are compared with: their whole group, which a slice then waits for; what is there of the
    group, each sample itself left out; or previews of the prompt at other seeds."""
    trainers_generate: bool = False
    """GPUs of the learner roll out while it has nothing to train, as far as all is then trained earlier. They
    hold both models (``fleet.driver: ray``)."""
    switch_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that it takes them to change from training to rolling out, or back, as profiled."""
    next_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of the next iteration's groups, how many may be rolled out before this one is trained, one policy
    version stale; the seeds of these are not explored (``fleet.driver: ray``)."""
