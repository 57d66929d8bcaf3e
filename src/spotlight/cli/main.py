"""The command ``spotlight``. Commands import lazily, so that it starts fast."""

from __future__ import annotations

import logging
import os

import typer

import spotlight
from spotlight.cli.config_command import config
from spotlight.cli.doctor import doctor
from spotlight.cli.runs.audit import audit
from spotlight.cli.runs.card import card
from spotlight.cli.runs.evaluate import evaluate
from spotlight.cli.runs.export import export
from spotlight.cli.runs.generate import generate
from spotlight.cli.runs.list_runs import runs
from spotlight.cli.runs.train import train
from spotlight.cli.tiny_command import tiny
from spotlight.registry import COMMANDS
from spotlight_rewards.commands.any_terminal import AnyTerminal
from spotlight_rewards.commands.exit_codes import complain, failure
from spotlight_rewards.registry import RegistryError


def wait_for_threads_asleep() -> None:
    """Let torch's CPU threads wait for each other asleep, unless the environment says how they wait."""
    # GNU OpenMP reads it as torch is imported. By default it spins for milliseconds: on shared cores a thread
    # that waits has the core of the one it waits for, and a step takes more than twice as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def version() -> None:
    """Print the version of Spotlight.

    [bold]Example[/bold]: spotlight version
    """
    typer.echo(spotlight.__version__)


def prepare_process() -> None:
    """What every command does first."""
    wait_for_threads_asleep()
    # transformers says of every image processor that it does without torchvision, which changes nothing.
    fallbacks = logging.getLogger("transformers.utils.import_utils")
    fallbacks.addFilter(lambda record: "requires torchvision" not in record.getMessage())


_ELSEWHERE = {
    **dict.fromkeys(("simulate", "plan", "calibrate", "prices", "traces", "sweep"), "plan"),
    **dict.fromkeys(("dashboard", "report", "compare", "why"), "dashboard"),
}
"""Commands of packages that may not be installed, with the extra that installs them."""


app = typer.Typer(
    name="spotlight",
    cls=AnyTerminal,
    callback=prepare_process,
    help="Reinforcement-learning post-training of Diffusion Transformers on cheap, preemptible GPUs.",
    epilog="Start with: spotlight train (the embedded default: a tiny Qwen-Image, minutes on a laptop).",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for name, command, panel in (
    ("train", train, "Run"),
    ("runs", runs, "Run"),
    ("audit", audit, "Run"),
    ("eval", evaluate, "Use"),
    ("generate", generate, "Use"),
    ("export", export, "Use"),
    ("card", card, "Use"),
    ("config", config, "Look up"),
    ("tiny", tiny, "Look up"),
    ("doctor", doctor, "Look up"),
    ("version", version, "Look up"),
):
    app.command(
        name,
        rich_help_panel=panel,
        no_args_is_help=name in {"eval", "generate", "export", "card", "audit", "tiny"},
    )(command)

for _package in COMMANDS:
    try:
        COMMANDS.load(_package)(app)
    except RegistryError as error:  # the other commands work without that package
        complain(str(error))
    except Exception as error:  # noqa: BLE001 - what other packages' code raises, too
        complain(
            f"the commands of {COMMANDS.origin(_package)} are left out: adding them raised "
            f"{type(error).__name__}: {error}. Repair that package or uninstall it."
        )


def _say_how_to_install(context: typer.Context) -> None:
    extra = _ELSEWHERE[context.info_name or ""]
    raise failure(
        f"'spotlight {context.info_name}': found no working package spotlight-{extra}; expected it, because "
        f"it has this command. pip install 'spotlight-rl[{extra}]'."
    )


for _name in _ELSEWHERE.keys() - {command.name for command in app.registered_commands}:
    _anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(_name, hidden=True, context_settings=_anything)(_say_how_to_install)
