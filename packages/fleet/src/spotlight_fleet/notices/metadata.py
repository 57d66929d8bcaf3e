"""HTTP requests to a metadata service, bounded in time and size. I/O.

No proxy (``HTTP_PROXY`` must not receive this machine's tokens), no redirects, no keep-alive (the service may
restart). Failures are :class:`MetadataError` with the request.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import MAXYEAR, UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx2

from spotlight_fleet.notices.notice import MetadataError, NoticeError, NoticeTrouble

LINK_LOCAL_URL = "http://169.254.169.254"
"""Address of the service on AWS, GCP and Azure."""
BYTES_MAX = 1 << 20


def utc_now() -> datetime:
    """This machine's clock."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """A response.

    Attributes:
        headers: lower-case names.
        request: ``GET http://...``, for errors.
        now: the service's clock, to which its deadlines refer; without a Date header, this machine's.
    """

    status: int
    headers: Mapping[str, str]
    text: str
    request: str
    now: datetime

    def remaining_s(self, deadline: datetime) -> float:
        """Seconds until ``deadline``, at least 0."""
        return max(0.0, (deadline - self.now).total_seconds())

    def require_ok(self, hint: str = "") -> None:
        """Raise :class:`MetadataError` unless the status is 200; ``hint`` is the remedy for a refusal."""
        if self.status != 200:
            refused = 300 <= self.status < 500 and self.status not in {408, 410, 429}
            trouble = NoticeTrouble.REFUSED if refused else NoticeTrouble.BROKEN
            raise self.error(trouble, f"answered {self.status}", "200", hint if refused else "")

    def json_object(self) -> Mapping[str, object]:
        """The body as a JSON object. Raises :class:`MetadataError`."""
        try:
            value: object = json.loads(self.text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self.error(NoticeTrouble.BROKEN, f"sent {self.text[:80]!r}", "a JSON object")
        return value

    def error(self, trouble: NoticeTrouble, found: str, expected: str, hint: str = "") -> MetadataError:
        """Build an error about this response."""
        return MetadataError(trouble, f"{self.request} {found}; expected {expected}. {hint}".rstrip())


@dataclass(frozen=True, slots=True)
class MetadataServer:
    """A metadata service. Raises :class:`NoticeError` unless ``base_url`` is ``http://HOST[:PORT]``."""

    base_url: str = LINK_LOCAL_URL
    wall_clock: Callable[[], datetime] = utc_now

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            sound = parts.scheme == "http" and parts.hostname is not None and parts.port != 0
        except ValueError:
            sound = False
        if not sound or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
            raise NoticeError(
                f"endpoint {self.base_url!r}; expected http://HOST or http://HOST:PORT and nothing after it, "
                f"such as {LINK_LOCAL_URL}"
            )

    async def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        timeout_s: float,
        *,
        method: str = "GET",
        body: str = "",
        silence: str = "",
    ) -> MetadataAnswer:
        """Send one request and return the response, whatever its status.

        Args:
            timeout_s: for the whole exchange.
            silence: remedy to name if there is no response.

        Raises:
            MetadataError: ``ABSENT``: no connection, time-out; ``BROKEN``: not HTTP, not text, too large.
        """
        url = self.base_url.rstrip("/") + path
        request = f"{method} {url}"
        try:
            async with asyncio.timeout(timeout_s):
                response, content = await _exchange(method, url, headers, body, timeout_s)
            text = content.decode("utf-8")
        except (TimeoutError, httpx2.TimeoutException):
            message = f"{request} was not answered within {timeout_s:g} s. {silence}"
            raise MetadataError(NoticeTrouble.ABSENT, message.rstrip()) from None
        except httpx2.NetworkError as error:
            message = f"{request} found no metadata service ({error or type(error).__name__}). {silence}"
            raise MetadataError(NoticeTrouble.ABSENT, message.rstrip()) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeDecodeError) as error:
            message = (
                f"{request} could not be read ({error or type(error).__name__}); expected text over HTTP."
            )
            raise MetadataError(NoticeTrouble.BROKEN, message) from None
        received = {name.lower(): value for name, value in response.headers.items()}
        return MetadataAnswer(response.status_code, received, text, request, self._now(received.get("date")))

    def _now(self, date: str | None) -> datetime:
        stated = parse_http_date(date or "")
        # The header has whole seconds; rounding up never overstates the remaining time.
        if stated is None or stated.year == MAXYEAR:  # whose last second has none after it
            return self.wall_clock()
        return stated + timedelta(seconds=1)


async def _exchange(
    method: str, url: str, headers: Mapping[str, str], body: str, timeout_s: float
) -> tuple[httpx2.Response, bytearray]:
    content = bytearray()
    # Skip loading certificates (0.2 s): the address is checked to be http.
    async with (
        httpx2.AsyncClient(
            timeout=timeout_s,
            trust_env=False,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            limits=httpx2.Limits(max_keepalive_connections=0),
        ) as client,
        client.stream(method, url, headers=dict(headers), content=body.encode()) as response,
    ):
        async for part in response.aiter_bytes():
            content += part
            if len(content) > BYTES_MAX:
                raise MetadataError(
                    NoticeTrouble.BROKEN, f"{method} {url} sent more; expected at most {BYTES_MAX} bytes."
                )
    return response, content


def parse_http_date(text: str) -> datetime | None:
    """Parse ``Mon, 19 Sep 2016 18:29:47 GMT`` (RFC 9110); None if malformed."""
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date
