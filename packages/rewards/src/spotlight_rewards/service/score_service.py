"""Serves rewards over HTTP in the JSON of UniRL's reward service, which the reward ``http`` speaks.

    GET  /health   open to all
    GET  /rewards  their names, and what scores
    GET  /metrics  pictures and seconds, in the text format of Prometheus
    POST /score    see ``endpoints/service_scores.py``

A reward has its own processes, so that one that fails or hangs holds up no other. A picture without a score
has an entry in ``errors`` with the reason, never a zero. Imports FastAPI.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import io
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from PIL import Image as PILImage
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotlight_rewards.base.web_origin import from_another_site, under_another_name
from spotlight_rewards.pool.reward_lane import SampleAbandonedError
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import RewardBatch, RewardFailure
from spotlight_rewards.reward import Image
from spotlight_rewards.service.score_body import REQUESTS_MAX, BodyError, ScoreRequest, read_body

BODY_MAX_BYTES = 256 << 20
PIXELS_MAX = 1 << 24
"""Of a picture. A file of a few kB may hold as many as its format can count."""
REQUEST_PIXELS_MAX = 1 << 28
"""Of the pictures of a request together: 0.8 GB."""
SERVICE_PIXELS_MAX = 1 << 29
"""Of all pictures that wait or are scored."""
SERVICE_BODIES_MAX_BYTES = 512 << 20
"""Of all requests that are read or answered."""
_FORMATS = ("PNG", "JPEG")
_RETRY_AFTER_S = 5
_MESSAGE_MAX = 2000
_LOOK_FOR_CLIENT_S = 0.2
_BODY_TIMEOUT_S, _BODY_BYTES_S = 30.0, 1e6
"""A body may take so long to arrive, and a second more for so many bytes."""
_UNREADABLE = (binascii.Error, OSError, ValueError, SyntaxError, PILImage.DecompressionBombError)


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample's scores, and why there are none, by reward."""

    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class ServiceBusyError(RuntimeError):
    """The service takes no more pictures until some are scored."""


class ScoreService:
    """Scores requests with one pool per reward, and counts.

    Args:
        pools: by reward, each with that reward alone.
        waiting_max, pixels_max, bytes_max: pictures that may wait or be scored at once, their pixels, and the
            bytes of requests that are read or answered. One request always may.
    """

    def __init__(
        self,
        pools: Mapping[str, RewardPool],
        waiting_max: int = REQUESTS_MAX,
        pixels_max: int = SERVICE_PIXELS_MAX,
        bytes_max: int = SERVICE_BODIES_MAX_BYTES,
    ) -> None:
        self.pools = pools
        self._limits = {"pictures": waiting_max, "pixels": pixels_max, "bytes": bytes_max}
        self._held = dict.fromkeys(self._limits, 0)
        self._pictures: Counter[tuple[str, str]] = Counter()
        self._seconds = dict.fromkeys(pools, 0.0)

    def check_room(self, what: str, number: int, own: int = 0) -> None:
        """Keep within the limit of ``pictures``, ``pixels`` or ``bytes``. Raises ServiceBusyError.

        Args:
            own: of those that are held, those of the request that wants more.
        """
        held, most = self._held[what], self._limits[what]
        if number and held > own and held + number > most:
            raise ServiceBusyError(
                f"{held:,} {what} wait here; expected at most {most:,} with these {number:,}. Come again "
                "later, or send fewer at once."
            )

    @asynccontextmanager
    async def holding(self, what: str) -> AsyncIterator[Callable[[int], None]]:
        """Gives what takes so many more, all of which are given back. It raises ServiceBusyError."""
        own = 0

        def take(number: int) -> None:
            nonlocal own
            self.check_room(what, number, own)
            self._held[what] += number
            own += number

        try:
            yield take
        finally:
            self._held[what] -= own

    async def score(
        self, requests: Sequence[ScoreRequest], abandoned: Callable[[], bool] = lambda: False
    ) -> list[Answer]:
        """Score all samples, each by the rewards that it requires.

        Args:
            abandoned: nobody waits for the answers any more; what is not being scored yet then fails. Called
                in other threads.

        Raises:
            ServiceBusyError: too many pictures, or too large ones, wait.
        """
        files = [each.history[-1].image_b64 for each in requests]
        async with self.holding("pictures") as take_pictures, self.holding("pixels") as take_pixels:
            take_pictures(len(requests))
            pixels = await asyncio.to_thread(lambda: sum(map(pixels_of, files)))
            take_pixels(min(pixels, REQUEST_PIXELS_MAX))
            return await self._score(requests, files, abandoned)

    async def _score(
        self, requests: Sequence[ScoreRequest], files: Sequence[str], abandoned: Callable[[], bool]
    ) -> list[Answer]:
        answers = [Answer() for _ in requests]
        images = await asyncio.to_thread(_decoded, files)
        wanted: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            for name in dict.fromkeys(request.required_rewards):
                image = images[index]
                if name not in self.pools:
                    known = ", ".join(self.pools)
                    answers[index].errors[name] = f"{name!r} is not served here; expected one of {known}"
                elif isinstance(image, str):
                    answers[index].errors[name] = image
                    self._pictures[name, "failed"] += 1
                else:
                    wanted.setdefault(name, []).append(index)
        await asyncio.gather(
            *(self._by(name, own, requests, images, answers, abandoned) for name, own in wanted.items())
        )
        return answers

    def metrics(self) -> str:
        """Counters in Prometheus's text format."""
        lines = ["# TYPE spotlight_reward_pictures_total counter"]
        lines += [
            f'spotlight_reward_pictures_total{{reward="{name}",outcome="{outcome}"}} '
            f"{self._pictures[name, outcome]}"
            for name in self.pools
            for outcome in ("scored", "failed", "abandoned")
        ]
        lines.append("# TYPE spotlight_reward_seconds_total counter")
        lines += [
            f'spotlight_reward_seconds_total{{reward="{name}"}} {self._seconds[name]:g}'
            for name in self.pools
        ]
        return "\n".join(lines) + "\n"

    async def _by(
        self,
        name: str,
        own: Sequence[int],
        requests: Sequence[ScoreRequest],
        images: Sequence[Image | str],
        answers: Sequence[Answer],
        abandoned: Callable[[], bool],
    ) -> None:
        pictures = [image for index in own if not isinstance(image := images[index], str)]
        texts = [requests[index].history[-1].text for index in own]
        batch: RewardBatch | str
        started_s = time.perf_counter()
        try:
            records = [requests[index].metadata for index in own]
            pending = self.pools[name].submit(pictures, texts, records, abandoned=abandoned)
            batch = await asyncio.wrap_future(pending)
        except SampleAbandonedError:
            self._pictures[name, "abandoned"] += len(own)
            return
        except Exception as error:  # noqa: BLE001 - whatever happened, these pictures have no score
            batch = f"{type(error).__name__}: {error}"
        for at, index in enumerate(own):
            found = _of(name, batch, at)
            if isinstance(found, str):
                answers[index].errors[name] = found[-_MESSAGE_MAX:]
            else:
                answers[index].scores[name] = found
            self._pictures[name, "failed" if isinstance(found, str) else "scored"] += 1
        self._seconds[name] += time.perf_counter() - started_s


class RequestGate:
    """Refuses requests without the token, or of other sites, and bodies that are too long or do not arrive.

    Not a middleware of Starlette's kind, behind which nobody learns that a client has gone.

    Args:
        token: expected as ``Authorization: Bearer TOKEN``; empty: none is.
    """

    def __init__(self, app: ASGIApp, service: ScoreService, token: str) -> None:
        self._app, self._service, self._token = app, service, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if (refusal := self._refusal(request)) is not None:
            await refusal(scope, receive, send)
            return
        if request.method != "POST":
            await self._app(scope, receive, send)
            return
        try:
            async with self._service.holding("bytes") as take:
                await self._answer(scope, receive, send, take)
        except ServiceBusyError as error:
            await _busy(error)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, take: Callable[[int], None]) -> None:
        arrived: deque[Message] = deque()
        length = int(Headers(scope=scope)["content-length"])
        limit_s = _BODY_TIMEOUT_S + length / _BODY_BYTES_S
        # Bytes count when they are here: who announces many and sends none takes nothing from others.
        self._service.check_room("bytes", length)
        try:
            async with asyncio.timeout(limit_s):
                while not arrived or arrived[-1].get("more_body", False):
                    arrived.append(await receive())
                    take(len(arrived[-1].get("body", b"")))
        except TimeoutError:
            found = f"a body of {length} bytes that did not arrive in {limit_s:g} s; expected all of it"
            await _refusal(408, found, {"Connection": "close"})(scope, receive, send)
            return
        if arrived[-1]["type"] == "http.disconnect":
            return

        async def replayed() -> Message:
            return arrived.popleft() if arrived else await receive()

        await self._app(scope, replayed, send)

    def _refusal(self, request: Request) -> Response | None:
        if not self._token and (found := under_another_name(request.headers)):
            return _refusal(403, f"{found}. Serve with --token-env to be reached by other names")
        if request.method == "POST" and (found := from_another_site(request.headers)):
            return _refusal(403, found)
        given = request.headers.get("authorization", "").encode()
        right = not self._token or hmac.compare_digest(given, f"Bearer {self._token}".encode())
        if not right and (request.method == "POST" or request.url.path != "/health"):
            return _refusal(401, "no or a wrong token; expected Authorization: Bearer TOKEN")
        length = request.headers.get("content-length", "")
        chunked = "transfer-encoding" in request.headers  # overrides the length
        if request.method == "POST" and (chunked or not length.isdecimal()):
            return _refusal(411, "no Content-Length, or Transfer-Encoding beside it; expected a length alone")
        if length.isdecimal() and int(length) > BODY_MAX_BYTES:
            return _refusal(413, f"a body of {length} bytes; expected at most {BODY_MAX_BYTES}")
        return None


def service_app(service: ScoreService, token: str = "") -> FastAPI:
    """The service as a FastAPI application; ``token`` as :class:`RequestGate` has it."""
    app = FastAPI(title="Spotlight rewards", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestGate, service=service, token=token)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/rewards")
    async def rewards() -> dict[str, Any]:
        scorers = {name: pool.scored_by.get(name, "") for name, pool in service.pools.items()}
        return {"rewards": list(service.pools), "scored_by": scorers}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics())

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        parts = [part async for part in request.stream()]
        gone = threading.Event()
        watch = asyncio.create_task(_watch(request, gone))
        try:
            requests = await asyncio.to_thread(read_body, parts)
            parts.clear()
            answers = await service.score(requests, gone.is_set)
        except BodyError as error:
            return _refusal(error.status, str(error))
        except ServiceBusyError as error:
            return _busy(error)
        finally:
            watch.cancel()
        return JSONResponse(
            {"results": [each.scores for each in answers], "errors": [each.errors for each in answers]}
        )

    return app


def pixels_of(image_b64: str) -> int:
    """Of a picture that :func:`decode` would decode, without decoding it; else 0."""
    found = _opened(image_b64)
    pixels = 0 if isinstance(found, str) else found.width * found.height
    return pixels if pixels <= PIXELS_MAX else 0


def decode(image_b64: str, pixels_max: int = PIXELS_MAX) -> Image | str:
    """The picture [height, width, 3], or why it cannot be read; a larger one is not decoded."""
    found = _opened(image_b64)
    if isinstance(found, str):
        return found
    if found.width * found.height > pixels_max:
        return (
            f"the picture has {found.width} x {found.height} pixels; expected at most {PIXELS_MAX:,}, and "
            f"{REQUEST_PIXELS_MAX:,} in all pictures of a request"
        )
    try:
        return np.asarray(found.convert("RGB"))
    except _UNREADABLE as error:
        return _unreadable(error)


def _opened(image_b64: str) -> PILImage.Image | str:
    """The picture, of which only the size is read yet, or why it cannot be."""
    try:
        content = base64.b64decode(image_b64.partition("base64,")[2] or image_b64, validate=True)
        return PILImage.open(io.BytesIO(content), formats=_FORMATS)
    except _UNREADABLE as error:
        return _unreadable(error)


def _unreadable(error: Exception) -> str:
    return f"the picture cannot be read ({type(error).__name__}: {error}); expected PNG or JPEG in base64"


async def _watch(request: Request, gone: threading.Event) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(_LOOK_FOR_CLIENT_S)
    gone.set()


def _decoded(files_b64: Sequence[str]) -> list[Image | str]:
    found: list[Image | str] = []
    room = REQUEST_PIXELS_MAX
    for each in files_b64:
        image = decode(each, min(room, PIXELS_MAX))
        if not isinstance(image, str):
            room -= image.shape[0] * image.shape[1]
        found.append(image)
    return found


def _of(name: str, batch: RewardBatch | str, at: int) -> dict[str, float] | str:
    if isinstance(batch, str):
        return batch
    sample = batch.samples[at]
    if isinstance(sample, RewardFailure):
        return f"{sample.kind}: {sample.message}"
    score = sample.scores[name]
    return {**score.details, name: score.value}


def _busy(error: ServiceBusyError) -> JSONResponse:
    return _refusal(503, str(error), {"Retry-After": str(_RETRY_AFTER_S)})


def _refusal(status: int, found: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": found}, status_code=status, headers=headers)
