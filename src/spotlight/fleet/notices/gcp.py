"""Google Cloud: whether this Spot VM is being preempted, by a question that hangs until that changes.

https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_an_instance_was_preempted
and .../metadata/querying-metadata#waitforchange. The first question does not hang, so a preemption that
is under way is seen; the following ones name the ETag of the last answer, so no change between two is
missed. The warning is about 30 s, and not stated: it counts from when it is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote

from spotlight.fleet.notices.metadata import MetadataServer
from spotlight.fleet.notices.notice import Cloud, MetadataError, NoticeReading, NoticeTrouble, PendingNotice

PREEMPTED = "/computeMetadata/v1/instance/preempted"
NOTICE_S = 30.0
_FLAVOR = {"Metadata-Flavor": "Google"}
_REFUSED = "In a pod of GKE, the metadata server in between hides this value: use the host's network."


@dataclass(slots=True)
class GcpNotices:
    """Asks the metadata server.

    Attributes:
        period_s: bounds the questions to a server that should hang and does not.
        answer_s: longest wait for an answer that does not hang, and beyond ``hang_s`` for one that does.
        hang_s: the server is asked to answer after so long even if nothing changed.
    """

    server: MetadataServer
    period_s: float = 1.0
    answer_s: float = 2.0
    hang_s: int = 60
    name: str = field(default="gcp", init=False)
    _etag: str = field(default="", init=False)

    async def read(self) -> NoticeReading:
        """See :class:`NoticeSource`; waits for a change after the first answer."""
        try:
            preempted = await self._ask()
        except MetadataError:
            self._etag = ""  # what changed meanwhile is asked for at once
            raise
        if not preempted:
            return NoticeReading()
        detail = f"preempted: Google gives about {NOTICE_S:g} s"
        return NoticeReading((PendingNotice("preempted", "TRUE", NOTICE_S, detail),))

    async def acknowledge(self) -> bool:
        """Google takes no acknowledgement."""
        return False

    async def probe(self) -> None:
        """Raises :class:`MetadataError` if this is not Google Cloud."""
        await self._ask()
        self._etag = ""  # the first reading must not wait for a change

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
