"""Detects the cloud and its notice source. Clouds are in :data:`spotlight_fleet.notices.registry.CLOUDS`."""

from __future__ import annotations

import asyncio

from spotlight_fleet.notices.metadata import MetadataServer
from spotlight_fleet.notices.notice import (
    CloudSource,
    MetadataError,
    NoticeError,
    NoticeReading,
    NoticeTrouble,
)
from spotlight_fleet.notices.registry import CLOUDS

NO_CLOUD = "no cloud"
"""Name of the source of a cloud that has not answered yet."""


def cloud_source(cloud: str, server: MetadataServer) -> CloudSource:
    """Notice source of ``cloud``. Raises RegistryError."""
    return CLOUDS.load(cloud).notices(server)


class DetectedCloud:
    """The notice source of whichever cloud answers.

    Each reading looks for it again until one does: the service of a node that has just started may be late.
    """

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._found: CloudSource | None = None

    @property
    def name(self) -> str:
        """See ``NoticeSource``."""
        return NO_CLOUD if self._found is None else self._found.name

    @property
    def period_s(self) -> float:
        """See ``NoticeSource``."""
        return 0.0 if self._found is None else self._found.period_s

    async def read(self) -> NoticeReading | None:
        """See ``NoticeSource``."""
        if self._found is None:
            try:
                self._found = await find_cloud(self._server)
            except NoticeError as error:
                raise MetadataError(NoticeTrouble.ABSENT, str(error)) from None
        return await self._found.read()

    async def acknowledge(self) -> bool:
        """See ``NoticeSource``."""
        return self._found is not None and await self._found.acknowledge()


async def find_cloud(server: MetadataServer | None = None, timeout_s: float = 3.0) -> CloudSource:
    """Probe all clouds concurrently and return the one that answers correctly.

    Args:
        timeout_s: per cloud.

    Raises:
        NoticeError: none answers (the message says how each failed), or several do.
    """
    server = server or MetadataServer()
    sources = {cloud: cloud_source(cloud, server) for cloud in CLOUDS}
    failures = dict(
        zip(sources, await asyncio.gather(*(_probe(one, timeout_s) for one in sources.values())), strict=True)
    )
    found = [cloud for cloud, failure in failures.items() if not failure]
    if len(found) == 1:
        return sources[found[0]]
    if found:
        raise NoticeError(
            f"{server.base_url} answers as {' and '.join(found)}; expected one cloud. Name the right one."
        )
    tried = "\n".join(f"  {cloud}: {failure}" for cloud, failure in failures.items())
    raise NoticeError(
        f"no cloud's metadata service at {server.base_url}; expected one of {', '.join(CLOUDS)}. Off these "
        f"clouds, only SIGTERM can announce a preemption. Tried:\n{tried}"
    )


async def _probe(source: CloudSource, timeout_s: float) -> str:
    """Why it is not this cloud; empty if it is."""
    try:
        async with asyncio.timeout(timeout_s):
            await source.probe()
    except MetadataError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    return ""
