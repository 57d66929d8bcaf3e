"""The runs that the dashboard shows: those that go, and those whose disk fails for a while."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request

from spotlight_dashboard import dashboard_app as app_module
from spotlight_dashboard import shown_runs as shown_module
from spotlight_dashboard.run_folders import RunFolder


def test_a_run_that_goes_is_reported_once(empty_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (app_module, shown_module):
        monkeypatch.setattr(module, "LOOKS_EVERY_S", 0.01)
    for name in ("goes", "stays"):
        (empty_place / name).mkdir()
        (empty_place / name / "config.yaml").write_text("{}")
    shown = shown_module.ShownRuns([empty_place])
    looks = iter(range(20))

    class Asking:
        """A request whose browser leaves after some looks."""

        app = SimpleNamespace(state=SimpleNamespace(ends=lambda: False))

        async def is_disconnected(self) -> bool:
            number = next(looks, None)
            if number == 5:
                shutil.rmtree(empty_place / "goes")
            return number is None

    async def changes() -> list[str]:
        return [text async for text in app_module._changes(cast("Request", Asking()), shown)]

    first, *rest = asyncio.run(changes())
    assert '"goes"' in first
    assert [text for text in rest if text.startswith("event: runs")] == [
        'event: runs\ndata: {"names": ["stays"]}\n\n'
    ]


@pytest.mark.parametrize("broken", ["", "run"])
def test_a_run_whose_disk_fails_for_a_while_is_silent_and_not_gone(
    broken: str, empty_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_module, "LOOKS_EVERY_S", 0.0)
    for name in ("run", "no-run"):
        (empty_place / name).mkdir()
    (empty_place / "run" / "config.yaml").write_text("{}")
    place, status = empty_place.resolve(), Path.stat
    shown = shown_module.ShownRuns([empty_place])

    async def look(*failing: Path) -> tuple[list[str], bool]:
        def stat(path: Path, **how: Any) -> Any:
            if any(path.is_relative_to(each) for each in failing):
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return status(path, **how)

        monkeypatch.setattr(Path, "stat", stat)
        await shown.look()
        try:
            await shown.ask(RunFolder("run", place / "run"), "look", lambda _: None)
        except shown_module.SilentRunError:
            return list(await shown.look()), False
        return list(await shown.look()), True

    async def looks() -> list[tuple[list[str], bool]]:
        return [await look(), await look(place / broken, place / "no-run"), await look()]

    assert asyncio.run(looks()) == [(["run"], True), (["run"], False), (["run"], True)]
