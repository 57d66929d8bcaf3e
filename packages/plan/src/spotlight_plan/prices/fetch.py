"""HTTP GET with bounds on connect time, idle time, total time and size. I/O.

Every failure is a :class:`PriceError` that names the URL and the cause. Asynchronous, because only then does
the total time-out hold while headers trickle in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from spotlight_plan.prices.quotes import PriceError


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Time and size limits.

    Attributes:
        idle_s: to connect, and between two chunks.
        total_s: for the whole response.
    """

    idle_s: float = 10.0
    total_s: float = 60.0
    bytes_max: int = 64 << 20


def get_text(url: str, limits: FetchLimits, params: Mapping[str, str] | None = None) -> str:
    """Body of a 200 response, as UTF-8.

    Redirects are not followed: prices come only from the named URL.

    Raises:
        PriceError: no connection, time-out, too large, another status, not text.
    """
    body = asyncio.run(_get(url, limits, params))
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _failed(url, f"sent no text (byte {error.start})", "UTF-8") from None


async def _get(url: str, limits: FetchLimits, params: Mapping[str, str] | None) -> bytes:
    import httpx2  # keeps start-up fast for commands without prices

    body = bytearray()
    try:
        client = httpx2.AsyncClient(timeout=limits.idle_s)  # loads certificates: not the server's time
    except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:
        raise PriceError(
            f"{url} cannot be asked: {error}; expected a proxy and certificates that can be used. Change or "
            "unset ALL_PROXY, HTTPS_PROXY, HTTP_PROXY or SSL_CERT_FILE."
        ) from None
    try:
        async with (
            client,
            asyncio.timeout(limits.total_s),
            client.stream("GET", url, params=params) as response,
        ):
            if response.status_code != 200:
                raise _failed(url, f"answered {response.status_code} {response.reason_phrase}", "200 OK")
            async for part in response.aiter_bytes():
                body += part
                if len(body) > limits.bytes_max:
                    raise _failed(url, "sent more", f"at most {limits.bytes_max} bytes")
    except TimeoutError:
        raise _failed(url, f"was not done after {limits.total_s:g} s", "a whole answer") from None
    except httpx2.TimeoutException as error:
        what = f"said nothing for {limits.idle_s:g} s ({type(error).__name__})"
        raise _failed(url, what, "an answer") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        what = f"could not be read ({str(error) or type(error).__name__})"
        raise _failed(url, what, "an answer over HTTP") from None
    return bytes(body)


def _failed(url: str, found: str, expected: str) -> PriceError:
    return PriceError(f"{url} {found}; expected {expected}. Try later, or name another source.")
