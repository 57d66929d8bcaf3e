"""``spotlight rewards``: list the registered rewards, convert weights for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from spotlight.cli.exit_codes import errors_without_traceback
from spotlight.cli.options import silence_loading_bars

rewards_app = typer.Typer(invoke_without_command=True)


@rewards_app.callback()
def rewards(context: typer.Context) -> None:
    """List the registered rewards, each with its parameters.

    A reward of your own is named [bold]module:function[/bold]: any function
    (images, prompts, metadata, **params) that returns one number per image.

    [bold]Examples[/bold]

      spotlight rewards

      spotlight train 'rewards=\\[{name: jpeg_size}]'

      spotlight train 'rewards=\\[{name: "my_rewards:brightness"}]'

      spotlight rewards convert-geneval CHECKPOINT.pth OUT
    """
    if context.invoked_subcommand is not None:
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("name", "what it scores", "params"):
        table.add_column(title, overflow="fold")
    for row in registered_rewards():
        table.add_row(*row)
    console.print(table)
    console.print("\nYour own: [bold]module:function[/bold], from the current directory or a package.")


@rewards_app.command("convert-geneval", no_args_is_help=True)
def convert_geneval(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="OpenMMLab's .pth file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the converted detector.")],
) -> None:
    """Convert GenEval's own detector (OpenMMLab's Mask2Former, Swin-S) to transformers, without mmdet.

    [bold]Example[/bold]

      spotlight rewards convert-geneval CHECKPOINT.pth weights/geneval
    """
    silence_loading_bars()
    with errors_without_traceback():
        from spotlight.rewards.geneval.openmmlab import convert_checkpoint

        origin, tensors = convert_checkpoint(checkpoint, out)
    console = Console(highlight=False)
    console.print(f"{origin}: {tensors} tensors converted, none missing, none left.", soft_wrap=True)
    console.print(f"Use it: rewards=\\[{{name: geneval, params: {{detector: {out}}}}}]", soft_wrap=True)


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
        yield (
            name,
            line,
            ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters),
        )
