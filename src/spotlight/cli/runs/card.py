"""``spotlight card``: write a run's model card again."""

from __future__ import annotations

import typer

from spotlight.cli.exit_codes import told_plainly
from spotlight.cli.run_argument import RunArgument, find_run


def card(run: RunArgument) -> None:
    """Write the model card of a run (again): gallery, curves, configuration, cost, loading snippet.

    It lies in RUN/card, ready to be uploaded beside the weights.

    [bold]Examples[/bold]

      spotlight card demo

      hf upload YOU/NAME runs/demo/lora && hf upload YOU/NAME runs/demo/card
    """
    from spotlight.report.model_card import write_card
    from spotlight.report.record import read_run

    with told_plainly():
        typer.echo(write_card(read_run(find_run(run))))
