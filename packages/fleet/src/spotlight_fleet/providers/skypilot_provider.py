"""Spot nodes as managed jobs of SkyPilot, by its command ``sky``: each is a job, which SkyPilot starts again.

A job group that the jobs join shows them together, and ends them with it.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from spotlight_fleet.providers.command_provider import CommandProvider
from spotlight_fleet.providers.node_provider import NodeProviderKind, ProviderError, ProviderSetting
from spotlight_rewards.base.strict_section import StrictSection

_GIVEN = "--env SPOTLIGHT_HEAD --env SPOTLIGHT_NODE --secret SPOTLIGHT_TOKEN"
STOP = """
said=$(sky jobs cancel --yes --name "$SPOTLIGHT_NODE" 2>&1) && exit
case $said in *"No in-progress managed jobs"*) exit 0;; esac  # it has ended, or never began
echo "$said"
exit 1
"""


class SkyPilotSettings(StrictSection):
    """The task of a spot node, and where its jobs are shown."""

    task: Path = Path("launch/skypilot-spot.yaml")
    """A task of one machine that joins the cluster as ``$SPOTLIGHT_NODE``."""
    job_group: str | None = None
    """Id, or name, of the running job group that the jobs join, with which they end; default: the one that
    the head is in, if any. SkyPilot's API server must run managed jobs itself (consolidation mode).
    """

    @property
    def start(self) -> str:
        """The command that starts ``$SPOTLIGHT_NODE``."""
        group = "" if self.job_group is None else f"--job-group {shlex.quote(self.job_group)} "
        task = shlex.quote(str(self.task))
        return f'sky jobs launch --yes --detach-run --name "$SPOTLIGHT_NODE" {group}{task} {_GIVEN}'


def _open(settings: SkyPilotSettings, setting: ProviderSetting) -> CommandProvider:
    if shutil.which("sky") is None:
        raise ProviderError(
            "fleet.target.provider is skypilot, and there is no command `sky` in PATH; expected SkyPilot's. "
            "Install it for the head: pip install skypilot."
        )
    if not settings.task.is_file():
        raise ProviderError(
            f"fleet.target.params.task is {settings.task}, which is no file here; expected the YAML of a "
            "spot node's task. Set it, or start the run where launch/skypilot-spot.yaml is."
        )
    return CommandProvider(settings.start, STOP, setting.notes, setting.start_s)


SKYPILOT = NodeProviderKind(SkyPilotSettings, _open)
