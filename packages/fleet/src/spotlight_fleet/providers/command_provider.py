"""Nodes that two shell commands of the user's start and end, one at a time: SkyPilot's, or any cloud's.

Which nodes it has started is written to the run directory before a command runs, so that a head that is
killed loses none.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

from pydantic import StringConstraints

from spotlight_fleet.providers.node_notes import NodeNotes
from spotlight_fleet.providers.node_provider import (
    ClusterNode,
    NodeProviderKind,
    ProviderError,
    ProviderSetting,
)
from spotlight_fleet.providers.shell_command import ShellCommandError, run_shell_command
from spotlight_fleet.ray_names import SUFFIX
from spotlight_rewards.base.strict_section import StrictSection

_STOPS_AT_END = 3
_PAUSE_S = 5.0
Command = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class CommandSettings(StrictSection):
    """Two shell commands."""

    start: Command
    """Starts a spot node, which joins the cluster as ``$SPOTLIGHT_NODE``, and again when it was preempted."""
    stop: Command
    """Ends the node ``$SPOTLIGHT_NODE`` for good."""


class CommandProvider:
    """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`.

    A node that is away for longer than ``start_s`` is ended, and another is started: one in a call, since a
    run that ends waits for the call.

    Args:
        start, stop: the commands.
        keys: where they are in the configuration, for messages.
        prefix: of the names of nodes.
        variables: further ones of the commands.
    """

    def __init__(
        self,
        start: str,
        stop: str,
        notes: NodeNotes,
        start_s: float,
        *,
        keys: str = "fleet.target.params",
        prefix: str = "spot",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._start, self._stop, self._notes, self._start_s = start, stop, notes, start_s
        self._keys, self._prefix, self._variables = keys, prefix, variables or {}
        # How long they have been away is not known: it counts from now.
        self._seen_at = dict.fromkeys(notes.read(), time.monotonic())
        self._ended_at: dict[str, float] = {}

    def asked(self, present: Sequence[ClusterNode]) -> int:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""
        return len(self._seen_at.keys() | {self._started_as(node) for node in present})

    def ask(self, nodes: int, present: Sequence[ClusterNode], leaving: Sequence[ClusterNode]) -> int:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""
        now_s = time.monotonic()
        # One that was ended a moment ago may be listed still.
        going = {name for name, ended_s in self._ended_at.items() if now_s - ended_s <= self._start_s}
        there = {name for node in present if (name := self._started_as(node)) not in going}
        known = self._seen_at | dict.fromkeys(there, now_s)  # nodes started by hand are nodes, too
        away = [name for name in known if name not in there]
        lost = [name for name in away if now_s - known[name] > self._start_s]
        # The newest of those that have not come: the oldest are the first to be expected.
        able = [*map(self._started_as, leaving), *sorted(away, key=known.__getitem__, reverse=True)]
        able = [name for name in dict.fromkeys(able) if name in known and name not in lost]
        self._write(known)
        errors = [self._end(name) for name in [*lost, *able[: max(0, len(known) - len(lost) - nodes)]]]
        # A lost one that cannot be ended is none that is provided.
        provided = len(self._seen_at.keys() - set(lost))
        if provided < nodes:
            self._start_one()
            provided += 1
        for error in errors:
            if error is not None:
                raise error
        return provided

    def _start_one(self) -> None:
        name = f"{self._prefix}-{secrets.token_hex(3)}"
        self._write({**self._seen_at, name: time.monotonic()})
        try:
            self._run("start", name)
        except ProviderError:
            self._seen_at[name] = -math.inf  # lost already
            self._end(name)  # a part of it may be there
            raise
        self._seen_at[name] = time.monotonic()  # it has all of the time to join

    def _started_as(self, node: ClusterNode) -> str:
        """Without what distinguishes a node that is back before its earlier life is known to have ended."""
        name = node.name.partition(SUFFIX)[0]
        return name if name in self._seen_at or name in self._ended_at else node.name

    def close(self) -> None:
        """See :class:`~spotlight_fleet.providers.node_provider.NodeProvider`."""
        for turn in range(_STOPS_AT_END):
            if turn:
                time.sleep(_PAUSE_S)
            errors = [error for name in list(self._seen_at) if (error := self._end(name))]
            if not errors:
                return
        raise ProviderError(
            f"{', '.join(self._seen_at)} may still cost money: end them by hand. {errors[-1]}"
        )

    def _end(self, name: str) -> ProviderError | None:
        """End a node; returns why that failed."""
        try:
            self._run("stop", name)
        except ProviderError as error:
            return error
        self._ended_at[name] = time.monotonic()
        left = {each: seen_s for each, seen_s in self._seen_at.items() if each != name}
        with suppress(OSError):  # a full disk: the next attempt ends it once more
            self._write(left)
        self._seen_at = left
        return None

    def _run(self, key: str, name: str) -> None:
        command, variables = self._start if key == "start" else self._stop, {"SPOTLIGHT_NODE": name}
        try:
            run_shell_command(f"{self._keys}.{key}", command, {**variables, **self._variables}, self._start_s)
        except ShellCommandError as error:
            raise ProviderError(str(error)) from error

    def _write(self, seen_at: dict[str, float]) -> None:
        if seen_at.keys() != self._seen_at.keys():
            self._notes.write(seen_at)
        self._seen_at = seen_at


def _open(settings: CommandSettings, setting: ProviderSetting) -> CommandProvider:
    return CommandProvider(settings.start, settings.stop, setting.notes, setting.start_s)


COMMANDS = NodeProviderKind(CommandSettings, _open)
