"""``spotlight notices``: this node's preemption notices, as a training run would see them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from spotlight_rewards.base.terminal import printable
from spotlight_rewards.commands.exit_codes import EXIT_INTERRUPTED, errors_without_traceback, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotlight_fleet.notices.notice import Notice, Noticed, NoticeSource


CloudOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--cloud",
        metavar="NAME",
        help="Whose metadata service to ask: aws, gcp, azure, or one that a package adds; auto: find "
        "out; none: no one's.",
    ),
]
EndpointOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="Address of the metadata service, where it is not http://169.254.169.254.",
    ),
]
SigtermGraceSOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--sigterm-grace-s", min=0, help="Take SIGTERM as a notice too, with so long until SIGKILL."
    ),
]


def notices(
    cloud: CloudOption = "auto",
    endpoint: EndpointOption = None,
    sigterm_grace_s: SigtermGraceSOption = None,
    once: Annotated[bool, typer.Option("--once", help="Ask once, say what is pending, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one notice a line.")] = False,
) -> None:
    """Watch this node's preemption notices, exactly as a training run would see them.

    Run it on a node to test that notices reach it. It acknowledges nothing and stops nothing. A metadata
    service that does not answer yet is asked again, unless --once is given. Ctrl-C ends it.

    [bold]Examples[/bold]

      spotlight notices

      spotlight notices --cloud azure --once

      spotlight notices --cloud none --sigterm-grace-s 30

      spotlight notices --cloud aws --endpoint http://127.0.0.1:1338 --json
    """
    if cloud == "none" and (endpoint is not None or sigterm_grace_s is None):
        raise failure("--cloud none asks no metadata service; expected --sigterm-grace-s, and no --endpoint.")
    if once and sigterm_grace_s is not None:
        raise failure(
            "--once asks a metadata service, and SIGTERM cannot be asked for. Leave one of them out."
        )
    import asyncio

    # --once prints a single answer; otherwise each notice is a line.
    work = _once(cloud, endpoint, as_json) if once else _watch(cloud, endpoint, sigterm_grace_s, as_json)
    try:
        with errors_without_traceback():
            asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


async def _once(cloud: str, endpoint: str | None, as_json: bool) -> None:
    from spotlight_fleet.notices.watcher import ask_once

    source = await _cloud_source(cloud, endpoint)
    found = await ask_once(source)
    if as_json:
        typer.echo(json.dumps({"source": source.name, "notices": [_record(notice) for notice in found]}))
    elif not found:
        typer.echo(f"{source.name} answers; no notice is pending.")
    else:
        _print(found)


async def _watch(cloud: str, endpoint: str | None, sigterm_grace_s: float | None, as_json: bool) -> None:
    import random

    from spotlight_fleet.notices.clouds import NO_CLOUD
    from spotlight_fleet.notices.sigterm import catching_sigterm
    from spotlight_fleet.notices.watcher import NoticeWatcher

    def show(notice: Notice) -> None:
        if as_json:
            typer.echo(json.dumps(_record(notice)))
        else:
            _print([notice])

    with ExitStack() as stack:
        sources: list[NoticeSource] = []
        if sigterm_grace_s is not None:  # first: the signal may arrive during cloud detection
            sources.append(stack.enter_context(catching_sigterm(sigterm_grace_s)))
        if cloud != "none":
            sources.append(await _cloud_source(cloud, endpoint, waits=True))
        found = ["no cloud yet" if source.name == NO_CLOUD else source.name for source in sources]
        typer.echo(f"Watching {' and '.join(found)}. Ctrl-C ends.", err=True)
        await NoticeWatcher(sources, random.Random()).run(show)


async def _cloud_source(cloud: str, endpoint: str | None, *, waits: bool = False) -> NoticeSource:
    """The cloud's source; ``waits``: if none answers, one that looks again each time, as a run's."""
    from spotlight_fleet.notices.clouds import DetectedCloud, cloud_source, find_cloud
    from spotlight_fleet.notices.metadata import LINK_LOCAL_URL, MetadataServer
    from spotlight_fleet.notices.notice import NoticeError

    server = MetadataServer(LINK_LOCAL_URL if endpoint is None else endpoint)
    source: NoticeSource
    if cloud != "auto":
        source = cloud_source(cloud, server)
    else:
        try:
            source = await find_cloud(server)
        except NoticeError:
            if not waits:
                raise
            source = DetectedCloud(server)  # the watch says why
    if source.name == "azure":
        typer.echo("Azure's first answer can take two minutes.", err=True)
    return source


def _print(notices: Sequence[Notice]) -> None:
    from spotlight_fleet.notices.notice import Cancelled, Noticed

    for notice in notices:
        match notice:
            case Noticed():
                words, colour = f"this node goes in {_remaining_s(notice):.0f} s", "red"
            case Cancelled():
                words, colour = "cancelled: this node stays", "green"
            case _:
                words, colour = "the cloud advises to move", "yellow"
        stamp = typer.style(datetime.now(UTC).strftime("%H:%M:%SZ"), dim=True)
        # Not Rich, which exits inside the watch when its output pipe is closed.
        styled, detail = typer.style(words, fg=colour, bold=True), printable(notice.detail)
        typer.echo(f"{stamp}  {notice.source}: {styled} ({detail})")


def _record(notice: Notice) -> dict[str, object]:
    from spotlight_fleet.notices.notice import Noticed

    record: dict[str, object] = {
        "notice": type(notice).__name__.lower(),
        "source": notice.source,
        "detail": notice.detail,
    }
    if isinstance(notice, Noticed):
        remaining_s = _remaining_s(notice)
        deadline = datetime.now(UTC) + timedelta(seconds=remaining_s)
        record |= {"remaining_s": round(remaining_s, 1), "deadline": deadline.isoformat(timespec="seconds")}
    return record


def _remaining_s(notice: Noticed) -> float:
    import time

    return notice.remaining_s(time.monotonic())
