"""``spotlight tiny``: a small random pipeline of a family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotlight_rewards.base.file_errors import is_there, storage_errors
from spotlight_rewards.base.files import removed_if_failed
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure
from spotlight_rewards.commands.options import silence_loading_bars


def tiny(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="A family, as in model.family.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="Seed of the random weights.")] = 0,
    variant: Annotated[
        int, typer.Option(min=0, max=3, help="Other widths, heads, layers and VAE factors.")
    ] = 0,
) -> None:
    """Write a small random diffusers pipeline, about 1 MB, to try things without a GPU or a download.

    [bold]Examples[/bold]

      spotlight tiny flux tiny-flux

      spotlight train model.family=flux model.path=tiny-flux \\
        data.train=testbed data.test=testbed iterations=1
    """
    if is_there(directory):
        raise failure(f"DIR: {directory} exists; expected a directory that does not. Name another one.")
    with errors_without_traceback():
        from spotlight.registry import FAMILIES

        silence_loading_bars()
        kind = FAMILIES.load(family)
        with removed_if_failed(directory), storage_errors("cannot write a small pipeline", directory):
            kind.tiny(directory, seed=seed, variant=variant)
    typer.echo(directory)
