"""Printing on any terminal, whatever its encoding and width."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import Any

from typer.core import TyperGroup

_WITHIN_A_PARAGRAPH = re.compile(r"(?<!\n)\n(?![\n ]|Exit status:)")


def print_on_any_terminal() -> None:
    """Print ``?`` for a character that the terminal has not: a screen must never end the work of hours."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.setdefault("PYTHONIOENCODING", ":replace")  # for processes that are started from here


class AnyTerminal(TyperGroup):
    """Commands whose screens end no work, and whose help is as wide as the terminal."""

    def get_command(self, *args: Any) -> Any:
        """A command. Its help wraps where the terminal ends: Typer would keep the lines of its docstring."""
        command = super().get_command(*args)
        if command is not None and command.help:
            command.help = _WITHIN_A_PARAGRAPH.sub(" ", command.help)
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command."""
        print_on_any_terminal()
        return super().main(*args, **kwargs)
