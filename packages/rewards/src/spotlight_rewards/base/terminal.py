"""Text on a terminal, whoever wrote it: codes that would move the cursor, set titles or turn the direction of
writing are shown, not sent.

Importing this is enough for what Rich prints: it adds to Rich's private table of control codes to leave out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import control
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

_CODES = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - set(b"\t\n")
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CODES}


def printable(text: object) -> str:
    """The text with its lines and tabs, and other control codes written out: for what Rich does not print."""
    return str(text).translate(_SHOWN)


_left_out: dict[int, str | None] = control._CONTROL_STRIP_TRANSLATE  # type: ignore[assignment]
_left_out.update({code: shown for code, shown in _SHOWN.items() if code not in _left_out})


class TextConsole(Console):
    """Prints texts as they are: ``[/]`` in a prompt is no markup, ``:cat:`` in a path no picture."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)


def progress_bar(console: Console) -> Progress:
    """A bar that vanishes at its end, drawn on a terminal alone; its descriptions are texts as they are."""
    from rich import progress  # slow to import, and seldom needed

    described = progress.TextColumn("{task.description}", style="progress.description", markup=False)
    _, *others = progress.Progress.get_default_columns()
    hidden = not console.is_terminal
    return progress.Progress(described, *others, console=console, transient=True, disable=hidden)
