"""User-fixable errors, printed without a traceback, and exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.text import Text

from spotlight_rewards.base.device_errors import is_out_of_memory
from spotlight_rewards.base.errors import UserError
from spotlight_rewards.base.terminal import TextConsole

EXIT_STOPPED_BY_ERROR = 1
EXIT_NOT_STARTED = 2
EXIT_INTERRUPTED = 130


@contextmanager
def errors_without_traceback(exit_code: int = EXIT_NOT_STARTED) -> Iterator[None]:
    """Print a :class:`UserError`, or that a device is out of memory, and exit; propagate everything else."""
    try:
        yield
    except Exception as error:
        if is_explained(error):
            raise failure(str(error) or "out of memory", exit_code) from error
        raise


def is_explained(error: Exception) -> bool:
    """Whether the message alone tells a user what to do: a :class:`UserError`, or a lack of memory."""
    return isinstance(error, UserError) or is_out_of_memory(error)


def failure(message: str, exit_code: int = EXIT_NOT_STARTED) -> typer.Exit:
    """Print an error to stderr, and return the exception to raise."""
    complain(message)
    return typer.Exit(exit_code)


def complain(message: str) -> None:
    """Print an error to stderr."""
    console = TextConsole(stderr=True)
    console.print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=True)
