"""JSON over HTTP with limits on concurrency, time and size, retries, and a key from the environment. I/O.

Every call ends as a read answer or as a :class:`SampleError` with the reason; what would fail for every
sample (a refused key, a wrong address) is a :class:`RewardSetupError`, unless the server has already answered
this process. The key is sent, and stands in no message: where a server repeats it, it is cut out.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

from PIL import Image as PILImage
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from spotlight_rewards.pool.shared_limits import replicas, share_of_limit
from spotlight_rewards.reward import AwayError, Image, RewardSetupError, SampleError

if TYPE_CHECKING:
    import httpx2

BYTES_MAX = 8 << 20
"""Size limit of an answer."""
_PAUSE_MAX_S = 30.0
_AWAY = {408, 429, 502, 503, 504}
"""Answers of a server, or of a proxy in its place, that say nothing about the request."""
_MESSAGE_START, _MESSAGE_END = 600, 400
"""Characters kept of a long message: what was found comes first, what was expected and the remedy last."""
_SEARCHED = 1 << 17
"""Characters at each end of a message that are searched for the key; the rest is dropped unseen."""
LOOPBACK = {"localhost", "127.0.0.1", "::1"}

Seconds = Annotated[float, Field(gt=0, le=1e6)]
Read = TypeVar("Read")


class RewardServer(BaseModel):
    """Where a reward's server is, and how it is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    base_url: str
    """``http://HOST[:PORT][/PATH]`` or https; for an OpenAI-compatible endpoint usually up to ``/v1``."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key; empty: none is sent."""
    concurrency: PositiveInt = 8
    """Requests under way at once, by all processes of the reward together (``rewards[].replicas``)."""
    timeout_s: Seconds = 30.0
    """For one attempt, from connecting to the last byte."""
    batch_timeout_s: Seconds = 50.0
    """For one call of the reward; at most ``rewards[].deadline_s``, which kills its process."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Further attempts after no connection, a time-out, status 408, 429 or 5xx."""
    backoff_s: Seconds = 0.5
    """Pause before the second attempt; doubles with each. A longer ``Retry-After`` is respected."""

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            raise ValueError("not a URL; expected http://HOST[:PORT][/PATH]") from None
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("user, password, query or fragment in it; name a key's variable in api_key_env")
        if not sound:
            raise ValueError("expected http://HOST[:PORT][/PATH] or https://...")
        return url.rstrip("/")


Server = TypeVar("Server", bound=RewardServer)
Settings = TypeVar("Settings", bound=BaseModel)

COSTS = ("prompt_tokens", "completion_tokens", "cost_usd")
"""Curves of what was paid for: summed over a video's frames."""

_answered: set[str] = set()
"""Settings of the servers that have answered this process: key, address and model are right."""


@dataclass(frozen=True, slots=True)
class HttpCall(Generic[Read]):
    """One request.

    Attributes:
        path: below the server's ``base_url``.
        read: turns the answer's JSON into a value; may raise SampleError, or RewardSetupError for what would
            fail every sample. TypeError, ValueError and OverflowError fail the sample: the server lied.
        body: makes the body of a POST, in a thread; None: a GET.
    """

    path: str
    read: Callable[[Any], Read]
    body: Callable[[], Mapping[str, Any]] | None = None

    @property
    def method(self) -> Literal["GET", "POST"]:
        """GET without a body, else POST."""
        return "GET" if self.body is None else "POST"


class _TransientError(Exception):
    """An attempt failed in a way that may pass.

    Attributes:
        pause_s: the server's own wish.
        away: nobody answered, or somebody for it.
    """

    def __init__(self, found: str, pause_s: float = 0.0, *, away: bool = True) -> None:
        super().__init__(found)
        self.pause_s, self.away = pause_s, away


def parse_server(kind: type[Server], key: str, value: object, deadline_s: float | None = None) -> Server:
    """Check the settings of a server, and that its key is in the environment.

    Args:
        key: of the settings, for messages: ``vlm-judge reward: params.endpoint``.
        deadline_s: of the reward's calls; ``batch_timeout_s`` may not exceed it.

    Raises:
        RewardSetupError: names key, value found, value expected and remedy.
    """
    server = parse_settings(kind, key, value)
    if deadline_s is not None and server.batch_timeout_s > deadline_s:
        raise RewardSetupError(
            f"{key}.batch_timeout_s is {server.batch_timeout_s:g}, above the reward's rewards[].deadline_s, "
            f"{deadline_s:g}; expected at most that, or its process is killed. Raise deadline_s "
            "or lower batch_timeout_s."
        )
    if server.concurrency < replicas():
        raise RewardSetupError(
            f"{key}.concurrency is {server.concurrency}, fewer than the {replicas()} processes of the reward "
            "that share it; expected at least one each. Raise it, or lower rewards[].replicas."
        )
    _headers(server)
    return server


def parse_settings(kind: type[Settings], key: str, value: object) -> Settings:
    """Check a reward's settings; RewardSetupError names key, value found, value expected and remedy."""
    if isinstance(value, kind):
        return value
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([key, *map(str, first["loc"])])
        shown = set(kind.model_fields) - {"base_url", "extra_body"}  # these, and unknown ones, may hold a key
        is_shown = bool(first["loc"]) and first["loc"][0] in shown and first["type"] != "missing"
        found = f" is {first['input']!r}" if is_shown else ""
        known = ", ".join(kind.model_fields)
        raise RewardSetupError(
            f"{where}{found}: {first['msg']}. The settings are {known}; correct them in the configuration."
        ) from None


def ask_all(server: RewardServer, calls: Sequence[HttpCall[Read]]) -> list[Read | SampleError]:
    """Send all calls and read their answers, in order.

    Raises:
        RewardSetupError: no call can succeed: the key or the address is refused, or it is no such service.
            Once such a server has answered this process, it is the SampleError of that call instead.
    """
    return asyncio.run(_ask_all(server, calls)) if calls else []


def png_base64(image: Image) -> str:
    """A picture [height, width, 3] as PNG, in base64."""
    buffer = io.BytesIO()
    PILImage.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


async def _ask_all(
    server: RewardServer,
    calls: Sequence[HttpCall[Read]],
) -> list[Read | SampleError]:
    import httpx2  # keeps start-up fast for runs without such a reward

    concurrency = share_of_limit(server.concurrency)
    gate = asyncio.Semaphore(concurrency)
    host = urlsplit(server.base_url).hostname
    async with httpx2.AsyncClient(
        headers=_headers(server),
        timeout=server.timeout_s,
        limits=httpx2.Limits(max_connections=concurrency),
        verify=_tls(),
        trust_env=host not in LOOPBACK,  # a proxy does not lead to this machine
    ) as client:
        tasks: list[asyncio.Task[Read | SampleError]] = []
        for call in calls:
            answer = _answer(client, gate, server, call)
            tasks.append(asyncio.create_task(answer))
        try:
            await asyncio.wait(tasks, timeout=server.batch_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            late = {task for task in tasks if not task.done()}
            for task in tasks:
                if task not in late:
                    task.result()  # raises what fails for every sample
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    # Slow, or gone without a word in the middle: only what it left is asked for again.
    missed = AwayError(
        f"{server.base_url} had not answered all {len(calls)} requests after "
        f"batch_timeout_s={server.batch_timeout_s:g}; expected all. Raise it (and the reward's deadline_s), "
        "or concurrency, or start more servers."
    )
    return [missed if task in late else task.result() for task in tasks]


async def _answer(
    client: httpx2.AsyncClient,
    gate: asyncio.Semaphore,
    server: RewardServer,
    call: HttpCall[Read],
) -> Read | SampleError:
    async with gate:
        body = call.body
        content = None if body is None else await asyncio.to_thread(lambda: json.dumps(body()).encode())
        settings = server.model_dump_json()
        try:
            found = _read(await _with_retries(client, server, call, content), call.read)
        except SampleError as error:
            return type(error)(safe_message(server, error))
        except RewardSetupError as error:
            if settings in _answered:
                return SampleError(safe_message(server, error))
            raise RewardSetupError(safe_message(server, error)) from None
        _answered.add(settings)
        return found


def _read(body: Any, read: Callable[[Any], Read]) -> Read:
    try:
        return read(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SampleError(
            f"the server sent {body!r}, which cannot be read ({type(error).__name__}: {error}); expected an "
            "answer of its protocol."
        ) from None


async def _with_retries(
    client: httpx2.AsyncClient,
    server: RewardServer,
    call: HttpCall[Any],
    content: bytes | None,
) -> Any:
    url = server.base_url + call.path
    for attempt in range(server.retries + 1):
        try:
            status, body = await _attempt(client, server, call.method, url, content)
            return await _decoded_in_time(server, f"{call.method} {url}", status, body)
        except _TransientError as failed:
            if attempt == server.retries:
                raise (AwayError if failed.away else SampleError)(
                    f"{call.method} {url} {failed}, in the last of {attempt + 1} attempts; expected 200 OK. "
                    "See that the server runs and is not overloaded (concurrency, timeout_s, retries)."
                ) from None
            wished_s = server.backoff_s * 2**attempt * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(min(wished_s, _PAUSE_MAX_S), failed.pause_s))
    raise AssertionError("unreachable")


async def _attempt(
    client: httpx2.AsyncClient, server: RewardServer, method: str, url: str, content: bytes | None
) -> tuple[int, bytes]:
    import httpx2

    body = bytearray()
    try:
        async with (
            asyncio.timeout(server.timeout_s),
            client.stream(
                method, url, content=content, headers={"Content-Type": "application/json"}
            ) as response,
        ):
            async for part in response.aiter_bytes():
                body += part
                if len(body) > BYTES_MAX:
                    raise SampleError(f"{method} {url} sent more; expected at most {BYTES_MAX} bytes.")
    except (TimeoutError, httpx2.TimeoutException):
        raise _TransientError(f"was not done after timeout_s={server.timeout_s:g}") from None
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise RewardSetupError(f"{method} {url}: {error}; expected an address of a server.") from None
    except httpx2.HTTPError as error:
        raise _TransientError(f"failed ({str(error) or type(error).__name__})") from None
    status = response.status_code
    if status in (408, 429) or status >= 500:
        raise _TransientError(
            f"answered {status} ({_text(body)!r})",
            _seconds(response.headers.get("retry-after", "")),
            away=status in _AWAY,
        )
    return status, bytes(body)


async def _decoded_in_time(server: RewardServer, what: str, status: int, body: bytes) -> Any:
    try:
        async with asyncio.timeout(server.timeout_s):
            return await asyncio.to_thread(_decoded, server, what, status, body)
    except TimeoutError:
        raise SampleError(f"{what}: its answer could not be read in timeout_s={server.timeout_s:g}") from None


def _decoded(server: RewardServer, what: str, status: int, body: bytes) -> Any:
    found = f"{what} answered {status} ({_text(body)!r})"
    if status in (401, 403):
        source = f"the key in {server.api_key_env}" if server.api_key_env else "requests without a key"
        raise RewardSetupError(
            f"{found}: the server refuses {source}; expected 200 OK. Put a valid key into an environment "
            "variable and its name into api_key_env."
        )
    if status in (404, 405) or 300 <= status < 400:
        raise RewardSetupError(f"{found}; expected 200 OK. Check base_url and the model's name.")
    if status != 200:
        raise SampleError(f"{found}; expected 200 OK. The request does not suit this server or model.")

    def refuse(what: str) -> NoReturn:
        raise SampleError(f"{found}: {what}; expected JSON. Is base_url the service's own?")

    try:
        return json.loads(
            body.decode("utf-8", "replace"), parse_constant=lambda name: refuse(f"it contains {name}")
        )
    except (ValueError, RecursionError):
        refuse("no JSON")


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() and len(retry_after) < 7 else 0.0


def _key(server: RewardServer) -> str:
    if not server.api_key_env:
        return ""
    key = os.environ.get(server.api_key_env, "").strip()
    if not key:
        raise RewardSetupError(
            f"api_key_env of {server.base_url} is {server.api_key_env!r}, not set in the environment; "
            f"expected a key. Export {server.api_key_env}, or leave api_key_env empty."
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise RewardSetupError(
            f"the environment variable {server.api_key_env} holds more than a key (a space, or characters "
            "that HTTP does not carry); expected printable ASCII. Export it again."
        )
    return key


def _headers(server: RewardServer) -> dict[str, str]:
    key = _key(server)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _text(body: bytes | bytearray) -> str:
    return " ".join(body.decode("utf-8", "replace").split())


def safe_message(server: RewardServer, error: Exception) -> str:
    """An error's text without the key, and shortened after that: half a key is one as well."""
    text = str(error)
    if len(text) > 2 * _SEARCHED:  # megabytes would take seconds
        text = text[:_SEARCHED] + text[-_SEARCHED:]
    text = text.encode("utf-8", "backslashreplace").decode()  # JSON may hold halves of characters
    if key := _key(server):
        text = _spellings(key).sub("[key]", text)
    if len(text) > _MESSAGE_START + _MESSAGE_END:
        text = f"{text[:_MESSAGE_START]} ... {text[-_MESSAGE_END:]}"
    return text


@lru_cache(maxsize=8)
def _spellings(key: str) -> re.Pattern[str]:
    """The key as it is, and as JSON and Python may escape its characters, up to three times over."""

    def spelled(character: str) -> str:
        code = f"(?:u00|x)(?i:{ord(character):02x})"
        plain, slashes = re.escape(character), r"\\{1,8}"  # bounded: a body of backslashes stays cheap
        return rf"(?:{slashes}(?:{code})?)" if character == "\\" else rf"(?:{slashes}{code}|\\{{0,8}}{plain})"

    return re.compile("".join(map(spelled, key)))


@lru_cache(maxsize=1)  # reading the certificates takes 0.2 s
def _tls() -> ssl.SSLContext:
    import httpx2

    return httpx2.create_ssl_context()
