"""Clouds, by name: add one by a line here or by an entry point of the registry's group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotlight_rewards.registry import Registry

if TYPE_CHECKING:
    from spotlight_fleet.notices.notice import Cloud

CLOUDS: Registry[Cloud] = Registry(
    "fleet.notices.cloud",
    "spotlight.clouds",
    {
        "aws": "spotlight_fleet.notices.aws:AWS",
        "gcp": "spotlight_fleet.notices.gcp:GCP",
        "azure": "spotlight_fleet.notices.azure:AZURE",
    },
)
"""Clouds: a :class:`~spotlight_fleet.notices.notice.Cloud` with its preemption notices and prices."""
