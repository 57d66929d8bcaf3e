"""The command ``spotlight-rewards``: rewards without a trainer."""

from __future__ import annotations

import typer

from spotlight_rewards.commands import add_to

app = typer.Typer(
    name="spotlight-rewards",
    help="Score pictures and videos: GenEval, OCR, preference models, vision-language models, your own.",
    epilog="Start with: spotlight-rewards rewards (what there is), then: ... rewards check ocr.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
add_to(app)
