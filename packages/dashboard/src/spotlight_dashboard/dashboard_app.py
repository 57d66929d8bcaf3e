"""The dashboard's server: one page, answers as JSON, and a stream of what changed.

    GET /                           the page; all else wants a session or a token (``gate.py``)
    GET /api/runs                   names, states and progress; of runs that do not answer, that
    GET /api/runs/RUN/WHAT          see ``answers.py``
    GET /api/means                  a curve of several runs, as means over the seeds of a configuration
    GET /api/runs/RUN/picture/N/I   one picture of the evaluation at iteration N
    GET /api/runs/RUN/training/N/I  one picture of a group trained in iteration N
    GET /api/changes                server-sent events: a run's files have changed
    GET /metrics                    figures of all runs for Prometheus

Only votes are written (``voting.py``), and files are read by name from a list (``run_folders.py``).
Imports FastAPI.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.middleware.gzip import GZipMiddleware

from spotlight_dashboard.answers import BadQueryError, RunAnswers
from spotlight_dashboard.dashboard_keys import DashboardKeys
from spotlight_dashboard.figures import Axis, Json
from spotlight_dashboard.gate import Gate, add_sessions, png, text
from spotlight_dashboard.page_files import PAGE_FILES, page_file, plotly_bytes
from spotlight_dashboard.prometheus import CONTENT_TYPE, SILENT_FIGURES, exposition
from spotlight_dashboard.run_threads import ASKED_S
from spotlight_dashboard.shown_runs import LOOKS_EVERY_S, ShownRuns, SilentRunError
from spotlight_dashboard.views.findings import RunLimits
from spotlight_dashboard.views.gallery import FOLDERS
from spotlight_dashboard.views.gallery import picture as picture_of
from spotlight_dashboard.views.gallery import reference as reference_of
from spotlight_dashboard.views.means import means
from spotlight_dashboard.views.overview import AUDIT_S, silent_headline
from spotlight_dashboard.voting import add_votes
from spotlight_rewards.base.file_errors import StoreError

_SAYS_EVERY_S = 15.0
_RUNS_MAX = 31
"""Those that the page offers beside one."""


def dashboard_app(places: Sequence[Path], keys: DashboardKeys, limits: RunLimits | None = None) -> FastAPI:
    """The dashboard as a FastAPI application; streams end when its ``state.ends()`` is true.

    ``state.shown`` and ``state.answers`` are what it shows, for others of its process.

    Args:
        places: run directories, and folders of them.
        keys: who may ask.
        limits: of the runs.
    """
    app = FastAPI(title="Spotlight dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=2000)
    app.add_middleware(Gate, keys=keys)
    app.state.ends = lambda: False
    shown, answers = ShownRuns(places), RunAnswers(limits or RunLimits())
    app.add_exception_handler(SilentRunError, _silent)
    app.state.shown, app.state.answers = shown, answers
    _add_page(app)
    add_sessions(app, keys)
    _add_answers(app, shown, answers)
    _add_pictures(app, shown)
    add_votes(app, shown)
    return app


def _add_page(app: FastAPI) -> None:
    # In memory: files would be read by threads of a pool, which others could use up.
    index, plotly, packed = page_file("index.html").read_bytes(), *plotly_bytes()
    parts = {name: page_file(name).read_bytes() for name in PAGE_FILES}

    @app.get("/")
    async def page() -> Response:
        return Response(index, media_type="text/html")

    @app.get("/page/{name}")
    async def part(name: str, request: Request) -> Response:
        if name == "plotly.min.js":
            # The page asks for it with its version in the address, so that browsers may keep it.
            headers = {"Cache-Control": "max-age=86400", "Vary": "Accept-Encoding"}
            if "gzip" in request.headers.get("accept-encoding", ""):
                headers["Content-Encoding"] = "gzip"
            content = packed if "Content-Encoding" in headers else plotly
            return Response(content, media_type="text/javascript", headers=headers)
        if name not in parts:
            return text(404, "no such file")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(parts[name], media_type=kind, headers={"Cache-Control": "no-cache"})


def _add_answers(app: FastAPI, shown: ShownRuns, answers: RunAnswers) -> None:
    @app.get("/api/runs")
    async def runs() -> Response:
        answers.forget_others((await shown.look()).values())
        found = await shown.each("headline", answers.headline)
        lines = [each or silent_headline(name) for name, each in found.items()]
        places = [str(place) for place in shown.places]
        return _json({"runs": lines, "places": places, "plotly": version("plotly")})

    @app.get("/api/means")
    async def means_of(name: str, axis: Axis, request: Request) -> Response:
        there, wanted = await shown.look(), request.query_params.getlist("run")[:_RUNS_MAX]
        if missing := [each for each in wanted if each not in there]:
            return text(404, f"no run {missing[0][:100]!r} here")
        asked = (shown.ask(there[each], "curve", partial(answers.run_curve, name=name, axis=axis))
                 for each in wanted)  # fmt: skip
        try:
            return _json(means(await asyncio.gather(*asked)))
        except (StoreError, sqlite3.Error, OSError) as error:
            return text(409, str(error))

    @app.get("/metrics")
    async def metrics() -> Response:
        answers.forget_others((await shown.look()).values())
        found = await shown.each("figures", answers.figures)
        shown_figures = {name: SILENT_FIGURES if each is None else each for name, each in found.items()}
        return Response(exposition(shown_figures), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/api/runs/{name}/{what}")
    async def answer(name: str, what: str, request: Request) -> Response:
        run = (await shown.look()).get(name)
        if run is None:
            return text(404, f"no run {name[:100]!r} here")
        query, limit_s = dict(request.query_params), AUDIT_S if what == "audit" else ASKED_S
        try:
            found = await shown.ask(run, what[:100], lambda run: answers.answer(run, what, query), limit_s)
            with run.values():
                return text(404, "no such thing") if found is None else _json(found)
        except BadQueryError as error:
            return text(400, str(error))
        except (StoreError, sqlite3.Error, OSError) as error:
            return text(409, str(error))

    @app.get("/api/changes")
    async def changes(request: Request) -> Response:
        return StreamingResponse(
            _changes(request, shown), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )


def _add_pictures(app: FastAPI, shown: ShownRuns) -> None:
    def add_pictures(kind: str, folder: str) -> None:
        # The kind in full: a pattern would also take other addresses of four parts.
        @app.get(f"/api/runs/{{name}}/{kind}/{{iteration}}/{{index}}")
        async def picture(name: str, iteration: int, index: int) -> Response:
            return await png(
                shown.find(name, "picture", lambda run: picture_of(run, iteration, index, folder))
            )

    for kind, folder in FOLDERS.items():
        add_pictures(kind, folder)

    @app.get("/api/runs/{name}/reference/{picture}")
    async def reference(name: str, picture: str) -> Response:
        return await png(shown.find(name, "picture", lambda run: reference_of(run, picture)))


async def _changes(request: Request, shown: ShownRuns) -> AsyncIterator[str]:
    """``runs`` when runs have come or gone, ``changed`` with the names of runs that wrote something."""
    known = await shown.signatures()
    said, again = time.monotonic(), set[str]()
    yield f"retry: 2000\n\n{_event('runs', {'names': list(known)})}"
    while not (request.app.state.ends() or await request.is_disconnected()):
        await asyncio.sleep(LOOKS_EVERY_S)
        now = await shown.signatures()
        if known.keys() != now.keys():
            yield _event("runs", {"names": list(now)})
        before, known = known, now
        if changed := [name for name, signature in now.items() if before.get(name) != signature]:
            yield _event("changed", {"names": changed})
            again.update(changed)
        elif time.monotonic() - said > _SAYS_EVERY_S:
            # Once more: the answers to the first may have been older (see ``answers.py``).
            yield _event("changed", {"names": sorted(again)}) if again else ": still here\n\n"
            again.clear()
        else:
            continue
        said = time.monotonic()


async def _silent(request: Request, error: Exception) -> Response:
    return text(503, str(error))


def _event(name: str, data: Json) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _json(found: Json) -> Response:
    # In ASCII: half a surrogate pair, which YAML and file names can hold, has no UTF-8.
    return Response(json.dumps(found, allow_nan=False), media_type="application/json")
