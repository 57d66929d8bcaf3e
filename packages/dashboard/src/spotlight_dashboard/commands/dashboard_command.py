"""``spotlight dashboard``: a page on runs, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from spotlight.cli.run_argument import RUNS
from spotlight.cli.runs.dashboard_beside import PORT
from spotlight.store.run_store import Wanted, local_folder, stored_runs
from spotlight_rewards.base.file_errors import StoreError, hidden, is_there
from spotlight_rewards.commands.exit_codes import complain, errors_without_traceback, failure
from spotlight_rewards.commands.serving import HostOption, TokenEnvOption, token_of

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from spotlight_dashboard.dashboard_keys import DashboardKeys

_INSTALL = "pip install 'spotlight-rl[dashboard]'"
_GOES_WITH_S = 2.0
_FOLLOWS_EVERY_S = 10.0


def dashboard(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUNS_DIR|RUN]...",
            help="Run directories, folders of them, or s3://BUCKET/PREFIX. (default: runs)",
        ),
    ] = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = PORT,
    token_env: TokenEnvOption = "",
    webhook_env: Annotated[
        str,
        typer.Option(
            help="Environment variable with the URL of a webhook that is sent alerts of running runs."
        ),
    ] = "",
    budget_usd: Annotated[
        float | None,
        typer.Option(min=0.0, help="Alert if a run is to cost more dollars."),
    ] = None,
    deadline_h: Annotated[
        float | None,
        typer.Option(min=0.0, help="Alert if a run is to take more hours of work."),
    ] = None,
    no_spot_min: Annotated[
        float, typer.Option(min=0.0, help="Alert if a run has been without spot nodes for so many minutes.")
    ] = 15.0,
    descriptor: Annotated[int, typer.Option("--fd", hidden=True, help="A socket that listens already.")] = -1,
    ends_with: Annotated[int, typer.Option(hidden=True, help="Process after which this one ends.")] = 0,
) -> None:
    """Show runs in the browser while they work, or later: progress, pictures, curves, nodes, money, ledger.

    Prints an address with a token that opens it in one browser; programs send the token of --token-env.

    Only reads the run directories, which may be on a mounted disk, and writes nothing there but the votes of
    people where a run asks for them. Needs neither the model nor a GPU, but
    pip install 'spotlight-rl\\[dashboard]'.

    [bold]Examples[/bold]

      spotlight dashboard

      spotlight dashboard runs /mnt/big/runs/qwen

      DASHBOARD_TOKEN=... spotlight dashboard --host 0.0.0.0 --token-env DASHBOARD_TOKEN

      ALERTS_URL=https://... spotlight dashboard --webhook-env ALERTS_URL --budget-usd 200
    """
    if descriptor >= 0:
        os.nice(5)  # the run that it is beside goes first
    from spotlight_dashboard.dashboard_keys import DashboardKeys

    keys, webhook = DashboardKeys(token_of(host, token_env)), _webhook(webhook_env)
    shown = places if descriptor >= 0 and places else [_place(place) for place in places or [RUNS]]
    with errors_without_traceback():
        app = _app(shown, keys, (budget_usd, deadline_h, no_spot_min))
        listening = socket.socket(fileno=descriptor) if descriptor >= 0 else _listen(host, port)
    if descriptor >= 0:
        keys.one_time(sys.stdin.readline().strip())  # of the address that the run has printed
    _serve(app, listening, keys, host, webhook, ends_with)


def _serve(
    app: FastAPI, listening: socket.socket, keys: DashboardKeys, host: str, webhook: str, ends_with: int
) -> None:
    """Until Ctrl-C, or the end of the process that it goes with."""
    import uvicorn

    from spotlight_rewards.service.guarded_connections import guarded

    server = uvicorn.Server(guarded(app, timeout_graceful_shutdown=3))
    app.state.ends = lambda: server.should_exit  # or an open page would hold it up
    if ends_with:
        threading.Thread(target=_end_after, args=(ends_with, server), daemon=True).start()
    else:
        keys.used = lambda: _print_address(host, listening.getsockname()[1], keys.one_time())
        keys.used()
        _start_alerts(app, webhook)
    server.run(sockets=[listening])


def _app(
    shown: Sequence[Path], keys: DashboardKeys, limits: tuple[float | None, float | None, float]
) -> FastAPI:
    """The page's server. Exits if a package or a file of the page is missing."""
    try:
        import uvicorn as uvicorn

        from spotlight_dashboard.dashboard_app import dashboard_app
    except ImportError as error:
        raise failure(f"dashboard: {error.name!r} is missing. Install it: {_INSTALL}") from error
    from spotlight_dashboard.page_files import plotly_file
    from spotlight_dashboard.views.findings import RunLimits

    plotly_file()
    return dashboard_app(shown, keys, RunLimits(*limits))


def _place(text: Path) -> Path:
    """The folder, or the run of that name in ``runs/``; exits if there is neither."""
    if stored_runs(text) is not None:
        with errors_without_traceback():
            folder = local_folder(text, complain)
        threading.Thread(target=_follow, args=(text,), daemon=True).start()
        return folder
    for path in (text, RUNS / text):
        if is_there(path) and path.is_dir():
            return path
    if text == RUNS:
        return text  # runs yet to come
    raise failure(
        f"RUNS_DIR: {str(text)!r} is no folder, nor is there a run of that name in {RUNS}/.{hidden(text)}"
    )


def _follow(address: Path) -> None:
    """Renew the copies of the runs at an address, pictures after the rest."""
    while True:
        refused = dict[str, None]()
        try:
            local_folder(address, refused.setdefault)
            local_folder(address, refused.setdefault, Wanted.PICTURES)
        except StoreError as error:
            refused.setdefault(str(error))
        for said in refused:
            complain(f"{said} The page shows what is here.")
        time.sleep(_FOLLOWS_EVERY_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise failure(
            f"--host {host} --port {port}: cannot listen there ({error.strerror or error}). "
            "Choose another --port, or 0 for any that is free."
        ) from error
    return listening


def _webhook(variable: str) -> str:
    """The URL that the variable holds; empty without one. Exits if it is none, without showing it."""
    url = os.environ.get(variable, "").strip() if variable else ""
    if variable and not _is_url(url):
        found = "holds no URL of a webhook" if url else "is not set in the environment"
        raise failure(
            f"--webhook-env is {variable!r}, which {found}; expected https://... Export {variable}."
        )
    return url


def _is_url(text: str) -> bool:
    import httpx2

    try:
        return bool(re.match(r"https?://[^/?#]", text) and urlsplit(text).hostname and httpx2.URL(text).host)
    except (ValueError, httpx2.InvalidURL):
        return False


def _start_alerts(app: FastAPI, webhook: str) -> None:
    from spotlight_dashboard.alerts import AlertWatch, watch_runs
    from spotlight_dashboard.shown_runs import ShownRuns

    shown: ShownRuns = app.state.shown
    watch = AlertWatch(app.state.answers, shown.threads)
    own = ShownRuns(shown.places, shown.threads)  # a loop's lock is of that loop
    arguments = (lambda: asyncio.run(own.look()), watch, webhook, threading.Event())
    threading.Thread(target=watch_runs, args=arguments, daemon=True).start()


def _end_after(process: int, server: uvicorn.Server) -> None:
    while Path(f"/proc/{process}").exists():
        time.sleep(_GOES_WITH_S)
    server.should_exit = True


def _print_address(host: str, port: int, token: str) -> None:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    address = f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"
    with suppress(OSError):  # whoever read this may have gone; sessions go on
        typer.echo(f"{address}?token={token}  (for one browser; Ctrl-C ends the dashboard)")
