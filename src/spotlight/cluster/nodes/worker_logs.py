"""Finds a worker process's output among Ray's logs on its node.

Ray redirects it to ``logs/worker-WORKER-JOB-PID.{out,err}`` of its session; the first lines name the actor.
Native crashes are in ``.err`` (faulthandler).
"""

from __future__ import annotations

import os
from pathlib import Path

_READ_MAX = 1 << 16
_HEAD_BYTES = 4096


def log_tail(logs: Path, pid: int | None, actor: str | None, lines: int) -> str:
    """The last ``lines`` lines of each non-empty stream of a worker process, as text for display.

    Without ``pid``, the latest process of ``actor`` is meant.
    """
    pattern = "worker-*" if pid is None else f"worker-*-{pid}"
    try:
        files = [file for end in ("out", "err") for file in logs.glob(f"{pattern}.{end}")]
        if pid is None:
            bearers = {file.stem: file.stat().st_mtime for file in files if _names(file, actor or "")}
            latest = max(bearers, key=lambda stem: bearers[stem], default=None)
            files = [file for file in files if file.stem == latest]
        parts = [text for file in sorted(files) if (text := _tail(file, lines))]
    except OSError as error:
        return f"no logs in {logs}: {error.strerror}"
    who = f"pid {pid}" if pid is not None else f"actor {actor}"
    return "\n".join(parts) if parts else f"nothing written by {who} in {logs}"


def _names(file: Path, actor: str) -> bool:
    with file.open("rb") as stream:
        return f":actor_name:{actor}\n".encode() in stream.read(_HEAD_BYTES)


def _tail(file: Path, lines: int) -> str:
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _READ_MAX))
        text = stream.read().decode(errors="replace")
    written = [
        line
        for line in text.splitlines()
        if line.strip() and not line.startswith((":job_id:", ":actor_name:"))
    ]
    return "\n".join([f"{file.name}:", *(f"  {line}" for line in written[-lines:])]) if written else ""
