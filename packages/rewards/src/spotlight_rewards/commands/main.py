"""The command ``spotlight-rewards``: rewards without a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import typer

from spotlight_rewards.commands.any_terminal import AnyTerminal
from spotlight_rewards.commands.prompts_command import prompts
from spotlight_rewards.commands.rewards_command import check, convert_geneval, list_rewards
from spotlight_rewards.commands.score_command import score
from spotlight_rewards.commands.serve_command import serve

_COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_rewards,
    "check": check,
    "score": score,
    "serve": serve,
    "prompts": prompts,
    "convert-geneval": convert_geneval,
}

app = typer.Typer(
    name="spotlight-rewards",
    cls=AnyTerminal,
    help="Score pictures and videos: GenEval, OCR, preference models, vision-language models, your own.",
    epilog="Start with: spotlight-rewards list, then: spotlight-rewards check ocr.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in _COMMANDS.items():
    # The examples of each are those of `spotlight rewards check`, `spotlight score` and so on.
    _help = (inspect.getdoc(_command) or "").replace("spotlight rewards ", "spotlight ")
    _help = _help.replace(f"spotlight {_name} ", f"spotlight-rewards {_name} ")
    app.command(_name, help=_help, no_args_is_help=_name != "list")(_command)
