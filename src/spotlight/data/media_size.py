"""The configured size of pictures or videos. Free of torch, for use in plans."""

from __future__ import annotations

from spotlight.config.sections.rollout import RolloutConfig
from spotlight.models.media import MediaSize


def media_size(rollout: RolloutConfig) -> MediaSize:
    return MediaSize(rollout.height, rollout.width, rollout.frames, rollout.fps)
