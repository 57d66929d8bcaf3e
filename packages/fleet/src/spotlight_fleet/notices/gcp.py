"""Google Cloud: preemption of this Spot VM, by a hanging GET that returns on change.

https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_an_instance_was_preempted
and .../metadata/querying-metadata#waitforchange. The first request does not hang, so an ongoing preemption is
seen; later ones send the last ETag, so no change is missed. The warning of about 30 s counts from when it is
seen: no deadline is stated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote

from spotlight_fleet.notices.metadata import MetadataServer
from spotlight_fleet.notices.notice import Cloud, MetadataError, NoticeReading, NoticeTrouble, PendingNotice

PREEMPTED = "/computeMetadata/v1/instance/preempted"
NOTICE_S = 30.0
_FLAVOR = {"Metadata-Flavor": "Google"}
_REFUSED = "In a pod of GKE, the metadata server in between hides this value: use the host's network."


@dataclass(slots=True)
class GcpNotices:
    """Queries the metadata server.

    Attributes:
        period_s: rate limit in case the server does not hang as it should.
        answer_s: time-out of a response, in addition to ``hang_s`` if the request hangs.
        hang_s: the server responds after this time even without a change.
    """

    server: MetadataServer
    period_s: float = 1.0
    answer_s: float = 2.0
    hang_s: int = 60
    name: str = field(default="gcp", init=False)
    _etag: str = field(default="", init=False)

    async def read(self) -> NoticeReading:
        """See :class:`NoticeSource`; waits for a change after the first response."""
        try:
            preempted = await self._ask()
        except MetadataError:
            self._etag = ""  # so that the retry sees a change at once
            raise
        if not preempted:
            return NoticeReading()
        detail = f"preempted: Google gives about {NOTICE_S:g} s"
        return NoticeReading((PendingNotice("preempted", "TRUE", NOTICE_S, detail),))

    async def acknowledge(self) -> bool:
        """Google accepts no acknowledgement."""
        return False

    async def probe(self) -> None:
        """Raises :class:`MetadataError` if this is not Google Cloud."""
        await self._ask()
        self._etag = ""  # so that the first reading does not wait for a change

    async def _ask(self) -> bool:
        path, timeout_s = PREEMPTED, self.answer_s
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={self.hang_s}&last_etag={quote(self._etag, safe='')}"
            timeout_s += self.hang_s
        answer = await self.server.ask(path, _FLAVOR, timeout_s)
        answer.require_ok(_REFUSED)
        if (flavor := answer.headers.get("metadata-flavor")) != "Google":
            raise answer.error(NoticeTrouble.BROKEN, f"sent Metadata-Flavor {flavor!r}", "'Google'")
        text = answer.text.strip()
        if text not in {"TRUE", "FALSE"}:
            raise answer.error(NoticeTrouble.BROKEN, f"sent {text[:80]!r}", "TRUE or FALSE")
        self._etag = answer.headers.get("etag", "")
        return text == "TRUE"


GCP = Cloud(GcpNotices)
