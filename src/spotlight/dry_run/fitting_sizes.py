"""The largest pictures and videos that fit GPUs of usual memory, by the memory plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotlight.config.schema import RunConfig
from spotlight.data.media_size import media_size
from spotlight.dry_run.fitting import Needs
from spotlight.dry_run.memory_plan import may_share, peak_bytes, shared_parts
from spotlight.dry_run.model_plan import ModelSizes
from spotlight.models.media import MediaSize
from spotlight_files.model_errors import ModelError

GPU_GIB = (12, 16, 24, 32, 48, 80, 141, 192)
RANKS = 8
SHORTER_PX = (256, 320, 384, 448, 480, 512, 576, 640, 704, 720, 768, 896, 1024, 1280, 1536, 2048)
USABLE = 0.9
"""Of a GPU's memory: CUDA's context and fragmentation take the rest."""


@dataclass(frozen=True, slots=True)
class FittingSize:
    """What fits a GPU of ``gpu_gib``.

    Attributes:
        alone: the largest size whose run fits one; None: none does.
        shared: the same where :data:`RANKS` share the model (``learner.shard``); None without.
    """

    gpu_gib: int
    alone: MediaSize | None
    shared: MediaSize | None


def fitting_sizes(config: RunConfig, needs: Needs) -> tuple[FittingSize, ...]:
    """For each of :data:`GPU_GIB`: sizes of the configured frames and proportions, all else unchanged."""
    alone: list[tuple[MediaSize, float]] = []
    shared: list[tuple[MediaSize, float]] = []
    for size in sizes_of(config, needs.model):
        sized = resized(config, size)
        parts = needs.parts(sized)
        alone.append((size, peak_bytes(parts)))
        if may_share(config):
            shared.append((size, peak_bytes(shared_parts(sized, needs.model, parts, RANKS))))
    return tuple(FittingSize(gib, _largest(alone, gib), _largest(shared, gib)) for gib in GPU_GIB)


def _largest(peaks: list[tuple[MediaSize, float]], gib: int) -> MediaSize | None:
    fitting = [size for size, peak in peaks if peak <= USABLE * gib * 2**30]
    return fitting[-1] if fitting else None


def resized(config: RunConfig, size: MediaSize) -> RunConfig:
    rollout = config.rollout.model_copy(update={"height": size.height, "width": size.width})
    return config.model_copy(update={"rollout": rollout})


def sizes_of(config: RunConfig, model: ModelSizes) -> Iterator[MediaSize]:
    """Ascending, those that the model has, with the configured one."""
    now, unit = media_size(config.rollout), model.dimensions.unit_px or model.dimensions.patch_px
    shorter = min(now.height, now.width)
    for side in sorted({*SHORTER_PX, shorter}):
        height, width = (
            unit * max(1, round(each * side / shorter / unit)) for each in (now.height, now.width)
        )
        size = MediaSize(height, width, now.frames, now.fps)
        try:
            model.dimensions.check_size(size, video=model.video)
        except ModelError:
            continue
        yield size
