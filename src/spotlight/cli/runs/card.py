"""``spotlight card``: rewrite a run's model card."""

from __future__ import annotations

import typer

from spotlight.cli.run_argument import RunArgument, find_run
from spotlight_rewards.base.terminal import printable
from spotlight_rewards.commands.exit_codes import errors_without_traceback


def card(run: RunArgument) -> None:
    """Write or rewrite the model card of a run: gallery, curves, settings, cost, loading snippet.

    It is written to RUN/card, ready to be uploaded with the weights.

    [bold]Examples[/bold]

      spotlight card demo

      hf upload YOU/NAME runs/demo/lora && hf upload YOU/NAME runs/demo/card
    """
    from spotlight.report.model_card import write_card
    from spotlight.report.record import read_run

    with errors_without_traceback():
        find_run(run, "lora")  # which its snippet loads
        typer.echo(printable(write_card(read_run(find_run(run, "pictures")))))
