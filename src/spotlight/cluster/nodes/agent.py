"""The agent of a node: an actor that watches for preemption notices, and tells what the node is. No torch.

One a node, without resources, so it fits beside everything. Ray runs the constructor of an actor without
coroutines in the process's main thread, where a handler of SIGTERM can be set, and with ``max_concurrency``
above 1 leaves that thread able to run it (a contract test sees to both). One ``async def`` in the class
would move it elsewhere: hence :class:`NoticeWatch`. Ray's own handler, which ends the process, is replaced:
what ends an agent is its node's end or SIGKILL.

The agent writes its pid beside Ray's logs (:func:`pid_file`): that is where a Kubernetes ``preStop`` hook
sends SIGTERM, because Kubernetes itself only tells the container's first process, which is Ray's.

The head's question for notices hangs until there is one; when the node dies, it fails, and that is how the
head learns of it first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from spotlight.cluster.nodes.facts import gather
from spotlight.cluster.nodes.notice_mail import Outbox
from spotlight.cluster.nodes.notice_watch import NoticeSettings, NoticeWatch
from spotlight.cluster.nodes.worker_logs import log_tail
from spotlight.fleet.notices.sigterm import SigtermNotices, catching_sigterm


def pid_file(session: Path, ray_id: str) -> Path:
    """Where the agent of a node writes its pid."""
    return session / f"spotlight_agent_{ray_id}.pid"


class NodeAgent:
    """Made into an actor by :func:`spotlight.cluster.nodes.node_membership.start_agent`.

    Args:
        ray_id: Ray's id of the node it is on.
        session: directory of Ray's logs on it.
        settings: of :class:`NoticeSettings`, as plain values; unknown ones are ignored.
    """

    def __init__(self, ray_id: str, session: str, settings: Mapping[str, object]) -> None:
        known = {key: value for key, value in settings.items() if key in NoticeSettings.__slots__}
        chosen = NoticeSettings(**known)  # type: ignore[arg-type]
        self._session = Path(session)
        self._outbox = Outbox()
        self._stack = ExitStack()
        sigterm: SigtermNotices | None = None
        if (grace_s := chosen.sigterm_grace_s) is not None:
            sigterm = self._stack.enter_context(catching_sigterm(grace_s))
        self._watch = NoticeWatch(chosen, sigterm, self._outbox)
        self._watch.start()
        _write_pid(pid_file(self._session, ray_id))

    def facts(self) -> dict[str, object]:
        """What this node is, as plain values (``facts.heard`` reads them)."""
        return gather().told()

    def notices(self, after: int, timeout_s: float) -> list[dict[str, object]]:
        """Messages after number ``after`` (``notice_mail.read_messages`` reads them); waits for one."""
        return self._outbox.after(after, timeout_s)

    def acknowledge(self) -> bool:
        """The node is drained: tell a cloud that waits for that. False: none does, or it was not told."""
        return self._watch.acknowledge()

    def log_tail(self, pid: int | None, actor: str | None, lines: int) -> str:
        """The end of what a worker process on this node wrote; see :func:`worker_logs.log_tail`."""
        return log_tail(self._session / "logs", pid, actor, lines)


def plain_settings(settings: NoticeSettings) -> dict[str, object]:
    """For :class:`NodeAgent`."""
    return asdict(settings)


def _write_pid(path: Path) -> None:
    # Whole or not at all: who reads it sends a signal.
    with contextlib.suppress(OSError):
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(f"{os.getpid()}\n")
        draft.replace(path)
