"""The node agent: an actor that watches for preemption notices and reports what the node is. No torch.

One per node, without resources, so it fits beside everything. Its SIGTERM handler replaces Ray's and must run
in the main thread: Ray guarantees that for an actor without coroutines and ``max_concurrency`` above 1 (a
contract test checks it), so the class must have no ``async def``.

The agent writes its pid beside Ray's logs (:func:`pid_file`) for a Kubernetes ``preStop`` hook, because
Kubernetes signals only the container's first process, which is Ray's.

The head long-polls for notices; when the node dies the call fails, usually the head's first sign of it.

Ray redirects a worker's output (:func:`log_tail`) to ``logs/worker-WORKER-JOB-PID.{out,err}`` of its session;
the first lines name the actor. Native crashes are in ``.err`` (faulthandler).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

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

    def log_tail(self, actor: str) -> str:
        """Last log lines of an actor's process on this node; see :func:`log_tail`."""
        return log_tail(self._session / "logs", actor)


def _write_pid(path: Path) -> None:
    # Written atomically: a truncated pid would signal the wrong process.
    with contextlib.suppress(OSError):
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(f"{os.getpid()}\n", encoding="utf-8")
        draft.replace(path)


# -- finds a worker process's output among Ray's logs on its node ------------------------------------------


_READ_MAX = 1 << 16
_HEAD_BYTES = 4096
_LINES = 20


def log_tail(logs: Path, actor: str) -> str:
    """The last lines of each non-empty stream of an actor's latest process, as text for display."""
    try:
        files = [file for end in ("out", "err") for file in logs.glob(f"worker-*.{end}")]
        bearers = {file.stem: file.stat().st_mtime for file in files if _names(file, actor)}
        latest = max(bearers, key=lambda stem: bearers[stem], default=None)
        parts = [text for file in sorted(files) if file.stem == latest and (text := _tail(file))]
    except OSError as error:
        return f"no logs in {logs}: {error.strerror}"
    return "\n".join(parts) if parts else f"nothing written by actor {actor} in {logs}"


def _names(file: Path, actor: str) -> bool:
    with file.open("rb") as stream:
        return f":actor_name:{actor}\n".encode() in stream.read(_HEAD_BYTES)


def last_lines(file: Path, most_bytes: int) -> list[str]:
    """The lines of its last bytes. Raises OSError."""
    with file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - most_bytes))
        return stream.read().decode(errors="replace").splitlines()


def _tail(file: Path) -> str:
    marks = (":job_id:", ":actor_name:")
    written = [line for line in last_lines(file, _READ_MAX) if line.strip() and not line.startswith(marks)]
    return "\n".join([f"{file.name}:", *(f"  {line}" for line in written[-_LINES:])]) if written else ""
