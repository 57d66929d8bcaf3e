"""``spotlight rewards``: list the registered rewards."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table


def rewards() -> None:
    """List the registered rewards, each with its parameters.

    A reward of your own is named [bold]module:function[/bold]: any function
    (images, prompts, metadata, **params) that returns one number per image.

    [bold]Examples[/bold]

      spotlight rewards

      spotlight train 'rewards=\\[{name: jpeg_size}]'

      spotlight train 'rewards=\\[{name: "my_rewards:brightness"}]'
    """
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("name", "what it scores", "params"):
        table.add_column(title, overflow="fold")
    for row in registered_rewards():
        table.add_row(*row)
    console.print(table)
    console.print("\nYour own: [bold]module:function[/bold], from the current directory or a package.")


def registered_rewards() -> Iterator[tuple[str, str, str]]:
    """(name, first sentence of documentation, parameters with defaults) per reward."""
    import importlib
    import inspect

    from spotlight.registry import REWARDS
    from spotlight.rewards.reward_registry import parse

    for name in REWARDS:
        reference = parse(name)
        function = getattr(importlib.import_module(reference.module), reference.attribute)
        line = (inspect.getdoc(function) or "").partition("\n")[0]
        parameters = list(inspect.signature(function).parameters.values())[3:]
        yield name, line, ", ".join(f"{p.name}={p.default!r}" for p in parameters)
