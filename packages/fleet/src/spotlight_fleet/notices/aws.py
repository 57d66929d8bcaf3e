"""AWS: interruption notices and rebalance recommendations of a Spot Instance, through IMDSv2.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
.../rebalance-recommendations.html. 401 means that the token expired, 404 that there is no notice. Warning is
two minutes at best; AWS advises polling every five seconds. IMDSv1 is not used: a server that answers without
a token may not be AWS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from spotlight_fleet.notices.metadata import MetadataAnswer, MetadataServer
from spotlight_fleet.notices.notice import Cloud, MetadataError, NoticeReading, NoticeTrouble, PendingNotice

TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
NOTICE_MAX_S = 120.0
"""AWS never gives more; a later deadline comes from a wrong clock."""
_HOPS = (
    "On AWS, a container often cannot reach it: set the instance's metadata option "
    "HttpPutResponseHopLimit to 2, or use the host's network."
)
_REFUSED = "Is the instance's metadata service (HttpEndpoint) enabled?"


@dataclass(slots=True)
class AwsNotices:
    """Polls the instance metadata service.

    Attributes:
        answer_s: time-out per response.
        token_ttl_s: requested lifetime; the service allows 1 s to 6 h.
    """

    server: MetadataServer
    period_s: float = 5.0
    answer_s: float = 2.0
    token_ttl_s: int = 21_600
    name: str = field(default="aws", init=False)
    _token: str = field(default="", init=False)

    async def read(self) -> NoticeReading:
        """See :class:`NoticeSource`."""
        action = await self._ask(ACTION)
        pending = () if action is None else (parse_action(action),)
        # Advice only: its failure must not hide the interruption notice just read.
        try:
            advice = await self._ask(REBALANCE)
            rebalance = "" if advice is None else parse_rebalance(advice)
        except MetadataError as error:
            return NoticeReading(pending, trouble=error)
        return NoticeReading(pending, rebalance)

    async def acknowledge(self) -> bool:
        """AWS accepts no acknowledgement."""
        return False

    async def probe(self) -> None:
        """Raises :class:`MetadataError` if this is not AWS."""
        await self._renew()

    async def _ask(self, path: str) -> MetadataAnswer | None:
        """Response with status 200, or None for 404."""
        if not self._token:
            await self._renew()
        answer = await self._with_token(path)
        if answer.status == 401:
            await self._renew()
            answer = await self._with_token(path)
        if answer.status == 404:
            return None
        if answer.status == 401:
            self._token = ""
            raise answer.error(NoticeTrouble.REFUSED, "refuses a token it has just given", "200 or 404")
        answer.require_ok(_REFUSED)
        return answer

    async def _with_token(self, path: str) -> MetadataAnswer:
        return await self.server.ask(path, {"X-aws-ec2-metadata-token": self._token}, self.answer_s)

    async def _renew(self) -> None:
        self._token = ""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.token_ttl_s)}
        answer = await self.server.ask(TOKEN, headers, self.answer_s, method="PUT", silence=_HOPS)
        answer.require_ok(_REFUSED)
        token = answer.text.strip()
        if not token or not token.isascii() or not token.isprintable() or set(token) & set(" <>{}"):
            raise answer.error(NoticeTrouble.BROKEN, f"sent {answer.text[:80]!r}", "a token")
        self._token = token


def parse_action(answer: MetadataAnswer) -> PendingNotice:
    """``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``. Raises :class:`MetadataError`."""
    sent = answer.json_object()
    action, time = sent.get("action"), sent.get("time")
    if not isinstance(action, str) or not action:
        raise answer.error(NoticeTrouble.BROKEN, f"sent action {action!r}", "terminate, stop or hibernate")
    remaining_s = min(answer.remaining_s(_time(answer, "time", time)), NOTICE_MAX_S)
    return PendingNotice(action, str(time), remaining_s, f"{action} at {time}")


def parse_rebalance(answer: MetadataAnswer) -> str:
    """``{"noticeTime": "2020-10-27T08:22:00Z"}``. Raises :class:`MetadataError`."""
    time = answer.json_object().get("noticeTime")
    _time(answer, "noticeTime", time)
    return f"rebalance recommended at {time}"


def _time(answer: MetadataAnswer, key: str, value: object) -> datetime:
    try:
        if not isinstance(value, str):
            raise ValueError
        time = datetime.fromisoformat(value)
        if time.utcoffset() != timedelta(0):
            raise ValueError
    except ValueError:
        raise answer.error(
            NoticeTrouble.BROKEN, f"sent {key} {value!r}", "a time in UTC such as 2017-09-18T08:22:00Z"
        ) from None
    return time


AWS = Cloud(AwsNotices, prices="spotlight_plan.prices.aws_prices:prices")
