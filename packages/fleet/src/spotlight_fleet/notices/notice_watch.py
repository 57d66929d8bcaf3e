"""Watches a node's notice sources in a thread and puts their notices into an outbox. No Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from dataclasses import dataclass

from spotlight_fleet.notices.clouds import DetectedCloud, cloud_source
from spotlight_fleet.notices.metadata import MetadataServer
from spotlight_fleet.notices.notice import NoticeError, NoticeSource
from spotlight_fleet.notices.notice_mail import Outbox
from spotlight_fleet.notices.watcher import NoticeWatcher

log = logging.getLogger("spotlight.cluster.notices")

_ACKNOWLEDGE_S = 10.0


@dataclass(frozen=True, slots=True)
class NoticeSettings:
    """Where notices come from.

    Attributes:
        cloud: whose metadata service is polled; ``auto``: detect on the node; ``none``: no polling.
        endpoint: address of the metadata service; None: its usual one.
        sigterm_grace_s: from SIGTERM to SIGKILL; None: SIGTERM is no notice.
    """

    cloud: str = "auto"
    endpoint: str | None = None
    sigterm_grace_s: float | None = 30.0


class NoticeWatch:
    """The watch of one node; :meth:`start` it once.

    Args:
        sigterm: a source made in the main thread; None: SIGTERM is no notice.
    """

    def __init__(self, settings: NoticeSettings, sigterm: NoticeSource | None, outbox: Outbox) -> None:
        self._settings, self._sigterm, self._outbox = settings, sigterm, outbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: NoticeWatcher | None = None

    def start(self) -> None:
        """Start watching; the thread ends with the process."""
        threading.Thread(target=self._run, name="notices", daemon=True).start()

    def acknowledge(self) -> bool:
        """Tell the cloud that the node is drained. False: no cloud waits for that, or the call failed."""
        if self._loop is None or self._watcher is None or self._loop.is_closed():
            return False
        asked = asyncio.run_coroutine_threadsafe(self._watcher.acknowledge(), self._loop)
        try:
            return asked.result(_ACKNOWLEDGE_S)
        except (NoticeError, TimeoutError) as error:
            log.warning("the cloud was not told that this node is drained: %s", error)
            return False

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except NoticeError as error:
            self._outbox.put(str(error))
        except Exception as error:
            log.exception("notices are watched no more")
            self._outbox.put(f"the watcher failed: {error!r}")
            raise

    async def _follow(self) -> None:
        sources = [source for source in (self._sigterm, self._cloud()) if source is not None]
        if not sources:
            self._outbox.put(
                "no source of notices; expected fleet.notices.cloud or fleet.notices.sigterm_grace_s"
            )
            return
        self._loop = asyncio.get_running_loop()
        self._watcher = NoticeWatcher(sources, random.Random(os.getpid()), warn=self._warn)
        await self._watcher.run(self._outbox.put)

    def _warn(self, why: str) -> None:
        """Without the list of what each cloud was asked, which is in this process's log."""
        self._outbox.put(why.splitlines()[0].removesuffix(" Tried:"))

    def _cloud(self) -> NoticeSource | None:
        choice, endpoint = self._settings.cloud, self._settings.endpoint
        server = MetadataServer() if endpoint is None else MetadataServer(endpoint)
        if choice == "none":
            return None
        return DetectedCloud(server) if choice == "auto" else cloud_source(choice, server)
