"""The node agent: an actor that watches for preemption notices and reports what the node is. No torch.

One per node, without resources, so it fits beside everything. Its SIGTERM handler replaces Ray's and must run
in the main thread: Ray guarantees that for an actor without coroutines and ``max_concurrency`` above 1 (a
contract test checks it), so the class must have no ``async def``.

The agent writes its pid beside Ray's logs (:func:`pid_file`) for a Kubernetes ``preStop`` hook, because
Kubernetes signals only the container's first process, which is Ray's.

The head long-polls for notices; when the node dies the call fails, usually the head's first sign of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from spotlight.cluster.nodes.worker_logs import log_tail
from spotlight_fleet.facts import gather
from spotlight_fleet.notices.notice_mail import Outbox
from spotlight_fleet.notices.notice_watch import NoticeSettings, NoticeWatch
from spotlight_fleet.notices.sigterm import SigtermNotices, catching_sigterm
from spotlight_fleet.ray_names import pid_file


class NodeAgent:
    """Made into an actor by :func:`spotlight.cluster.nodes.node_membership.start_agent`.

    Args:
        session: directory of Ray's logs on the node.
        settings: :class:`NoticeSettings` as plain values; unknown keys are ignored.
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
        """This node's facts as plain values, read by ``facts.read_facts``."""
        return gather().as_json()

    def notices(self, after: int, timeout_s: float) -> list[dict[str, object]]:
        """Messages after number ``after``, read by ``notice_mail.read_messages``; waits for the first."""
        return self._outbox.after(after, timeout_s)

    def acknowledge(self) -> bool:
        """Tell the cloud that the node is drained. False: no cloud waits for that, or the call failed."""
        return self._watch.acknowledge()

    def log_tail(self, pid: int | None, actor: str | None, lines: int) -> str:
        """Last log lines of a worker process on this node; see :func:`worker_logs.log_tail`."""
        return log_tail(self._session / "logs", pid, actor, lines)


def plain_settings(settings: NoticeSettings) -> dict[str, object]:
    """Settings as :class:`NodeAgent` takes them."""
    return asdict(settings)


def _write_pid(path: Path) -> None:
    # Written atomically: a truncated pid would signal the wrong process.
    with contextlib.suppress(OSError):
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(f"{os.getpid()}\n", encoding="utf-8")
        draft.replace(path)
