"""The dashboard's door: who is let in, and the headers of every answer.

    POST /api/session   {"token": TEXT}: a session's cookie for a token (``dashboard_keys.py``)

The page itself is open to all, since it is the same of every dashboard; what it asks for is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotlight_dashboard.dashboard_keys import GUESS_EVERY_S, SESSION_S, DashboardKeys
from spotlight_dashboard.page_files import CONTENT_POLICY
from spotlight_rewards.base.web_origin import from_another_site, under_another_name

SESSION = "/api/session"
_COOKIE = "spotlight_session"
_BODY_MAX = 1 << 12
_HEADERS = {
    "Content-Security-Policy": f"{CONTENT_POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Gate:
    """Refuses requests without session or token, and adds the headers of every answer.

    Without a token of the user's, only the loopback's names are served.
    """

    def __init__(self, app: ASGIApp, keys: DashboardKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._refusal(scope)
        await (refused or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        if not self._keys.own and (refusal := under_another_name(headers)):
            return text(403, f"{refusal}. Start the dashboard with --token-env to reach it by other names.")
        if path == SESSION or path == "/" or path.startswith("/page/"):
            return None
        if self._keys.is_session(cookie_parser(headers.get("cookie", "")).get(_cookie_name(headers), "")):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if not given or scheme.lower() != "bearer":  # a proxy in front may have Basic for itself
            return text(401, "no session, or one that is over; open the address that the dashboard prints")
        address = _address(scope)
        if not self._keys.guesses.may_try(address):
            return too_many()
        if self._keys.is_own(given):
            return None
        self._keys.guesses.was_wrong(address)
        return text(401, "a wrong token; expected that of --token-env, as Authorization: Bearer TOKEN")


def add_sessions(app: FastAPI, keys: DashboardKeys) -> None:
    """Add the route that opens sessions."""

    @app.post(SESSION)
    async def session(request: Request) -> Response:
        if refusal := not_from_here(request):
            return text(403, refusal)
        body = await body_of(request, _BODY_MAX)
        if body is None:
            return text(413, f"more than {_BODY_MAX} bytes")
        address = _address(request.scope)
        may_try = keys.guesses.may_try(address)
        opened = keys.open_session(_token(body), own_too=may_try)
        if opened is None:
            if not may_try:
                return too_many()
            keys.guesses.was_wrong(address)
            return text(
                401, "a wrong token, or one that was used; the dashboard prints a new one when one is"
            )
        answer = Response("{}", media_type="application/json")
        answer.set_cookie(
            _cookie_name(request.headers),
            opened,
            max_age=SESSION_S,
            path=None,  # of /api below whatever a proxy puts before it: others there have sessions, too
            httponly=True,
            samesite="strict",
            # As a proxy in front says: whoever makes it up has only their own cookie marked.
            secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto")),
        )
        return answer


def not_from_here(request: Request) -> str:
    """Why a request that changes something may be of another site's page; empty if it is not.

    Browsers say where a request comes from, and send JSON elsewhere only after asking, which is not answered.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "expected application/json"
    return from_another_site(request.headers)


async def body_of(request: Request, bytes_max: int) -> bytes | None:
    """What a request brings; None: more than that."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            return None
    return bytes(body)


async def png(found: Awaitable[bytes | None], cache: str = "no-cache") -> Response:
    """A picture, if there is one that can be read."""
    try:
        picture = await found
    except OSError as error:
        return text(409, str(error))
    if picture is None:
        return text(404, "no such picture")
    return Response(picture, media_type="image/png", headers={"Cache-Control": cache})


def text(status: int, found: str) -> PlainTextResponse:
    """An answer in words."""
    return PlainTextResponse(found.encode("utf-8", "backslashreplace"), status_code=status)


def too_many() -> Response:
    """Of an address that has guessed too often: whether it has the user's token is not looked at."""
    answer = text(429, "too many wrong tokens from this address; try again later")
    answer.headers["Retry-After"] = f"{GUESS_EVERY_S:.0f}"
    return answer


def _token(body: bytes) -> str:
    try:
        found = json.loads(body)["token"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def _address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def _cookie_name(headers: Headers) -> str:
    """One name per port as the browser sees it: to cookies all ports of a host are the same."""
    port = re.search(r":([0-9]+)$", headers.get("host", ""))
    return f"{_COOKIE}_{port[1]}" if port else _COOKIE
