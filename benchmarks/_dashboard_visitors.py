"""Clients of a dashboard, in a process of their own: HOST PORT CLIENTS. Imports little."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from urllib.parse import quote

REFRESH_S = 2.5
VIEWS = (
    ("overview", "accounting", "audit"),
    ("metrics", *(f"curve?name={quote(name, safe='')}" for name in ("rollout/reward", "train/loss"))),
    ("cluster?last_s=600",),
    ("pictures", "evaluation?iteration=0"),
)


async def visit(host: str, port: int, clients: int) -> None:
    """Watch until this process is ended."""
    await asyncio.gather(*(client(host, port, VIEWS[each % len(VIEWS)]) for each in range(clients)))


async def client(host: str, port: int, view: Sequence[str]) -> None:
    """One page: a stream of changes, and connections for answers."""
    changed = asyncio.Event()
    changed.set()

    async def follow() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(_request(host, "/api/changes"))
        while line := await reader.readline():
            if line.startswith(b"event: changed"):
                changed.set()

    following = asyncio.create_task(follow())
    while not following.done():
        await changed.wait()
        changed.clear()
        reader, writer = await asyncio.open_connection(host, port)
        for what in view:
            writer.write(_request(host, f"/api/runs/watched/{what}"))
            await _answer(reader)
        writer.close()
        await asyncio.sleep(REFRESH_S)
    following.result()


def _request(host: str, path: str) -> bytes:
    token = os.environ["BENCHMARK_DASHBOARD_TOKEN"]
    return (
        f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n"
        "Accept-Encoding: gzip\r\n\r\n"
    ).encode()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(head.decode())
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    return await reader.readexactly(length)


if __name__ == "__main__":
    asyncio.run(visit(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
