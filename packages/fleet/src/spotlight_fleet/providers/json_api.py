"""JSON over HTTPS to a service that manages machines: deadlines, retries, a size limit. I/O.

Asynchronous inside, because only then does the limit of a call hold while an answer trickles in.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spotlight_fleet.providers.node_provider import ProviderError

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
ATTEMPTS, PAUSE_S = 4, 0.5
"""Attempts of a call, and the pause before the second, which doubles with each."""
_BYTES_MAX = 32 << 20
_SHOWN = 300
"""Characters of an answer that a message shows."""


class RefusedError(ProviderError):
    """The service answered with a status that another attempt would not change."""

    def __init__(self, status: int, found: str) -> None:
        super().__init__(found)
        self.status = status


class _AgainError(ProviderError):
    """The attempt failed in a way that may pass."""


@dataclass(frozen=True, slots=True)
class JsonApi:
    """A service.

    Attributes:
        url: up to the path.
        authority: PEM file of the authority that signs its certificate; None: the system's.
        token: read for every attempt, since tokens are replaced while they are in use; in no message.
        timeout_s: of an attempt.
    """

    url: str
    authority: Path | None
    token: Callable[[], str]
    timeout_s: float

    def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """The JSON of a successful answer. Blocks for :data:`ATTEMPTS` times ``timeout_s``, and the pauses.

        No connection, no answer in time, 429 and 5xx are tried again; a refused token (401) once, since it
        may just have been replaced.

        Args:
            kind: media type of the body.

        Raises:
            RefusedError: any other status.
            ProviderError: no attempt was answered.
        """
        return asyncio.run(self._call(method, path, body, kind))

    async def _call(self, method: str, path: str, body: object, kind: str) -> Any:
        refused = 0
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._attempt(method, path, body, kind)
            except RefusedError as error:
                refused += error.status == 401
                if error.status != 401 or refused > 1:
                    raise
            except _AgainError as error:
                if attempt == ATTEMPTS:
                    raise ProviderError(
                        f"{error}, in the last of {attempt} attempts; expected an answer. See that "
                        f"{self.url} works; it is asked again later."
                    ) from None
            await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
        raise ProviderError(f"{method} {self.url}{path} was not answered; it is asked again later.")

    async def _attempt(self, method: str, path: str, body: object, kind: str) -> Any:
        import httpx2  # keeps start-up fast for runs without such a provider

        what = f"{method} {self.url}{path}"
        content = None if body is None else json.dumps(body).encode()
        headers: Mapping[str, str] = {"Authorization": f"Bearer {self.token()}", "Content-Type": kind}
        answer = bytearray()
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                httpx2.AsyncClient(
                    verify=self._tls() if self.url.startswith("https:") else False,
                    timeout=self.timeout_s,
                    trust_env=urlsplit(self.url).hostname not in LOOPBACK,
                ) as client,
                client.stream(method, self.url + path, content=content, headers=headers) as response,
            ):
                async for part in response.aiter_bytes():
                    answer += part
                    if len(answer) > _BYTES_MAX:
                        raise ProviderError(f"{what} sent more; expected at most {_BYTES_MAX} bytes.")
        except (TimeoutError, httpx2.TimeoutException):
            raise _AgainError(f"{what} was not done after {self.timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _AgainError(f"{what} failed ({str(error) or type(error).__name__})") from None
        return _decoded(what, response.status_code, bytes(answer))

    def _tls(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.authority)
        except OSError as error:
            raise ProviderError(
                f"{self.authority}: cannot be read as certificates ({error}); expected a PEM file. Name "
                "another, or run where the service account is mounted."
            ) from error


def _decoded(what: str, status: int, answer: bytes) -> Any:
    text = " ".join(answer.decode("utf-8", "replace").split())[:_SHOWN]
    found = f"{what} answered {status} ({text!r})"
    if status == 429 or status >= 500:
        raise _AgainError(found)
    if not 200 <= status < 300:
        raise RefusedError(status, found)
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise ProviderError(f"{found}; expected JSON. Is it the address of the service itself?") from None
