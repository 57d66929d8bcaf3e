"""The command ``spotlight``. Commands import lazily, so that it starts fast."""

from __future__ import annotations

import os

import typer

from spotlight.cli.config_command import config
from spotlight.cli.doctor import doctor
from spotlight.cli.planning.calibrate_command import calibrate
from spotlight.cli.planning.notices_command import notices
from spotlight.cli.planning.plan_command import plan
from spotlight.cli.planning.prices_command import prices
from spotlight.cli.planning.simulate_command import simulate
from spotlight.cli.planning.traces_command import traces
from spotlight.cli.runs.audit import audit
from spotlight.cli.runs.card import card
from spotlight.cli.runs.dashboard_command import dashboard
from spotlight.cli.runs.evaluate import evaluate
from spotlight.cli.runs.export import export
from spotlight.cli.runs.generate import generate
from spotlight.cli.runs.list_runs import runs
from spotlight.cli.runs.report_command import report
from spotlight.cli.runs.train import train
from spotlight.cli.scoring.prompts_command import prompts
from spotlight.cli.scoring.rewards_command import rewards_app
from spotlight.cli.scoring.score_command import score
from spotlight.cli.tiny_command import tiny
from spotlight.cli.version import version

_SPINS = "1000"


def wait_for_threads_asleep() -> None:
    """Let torch's CPU threads wait for each other asleep, unless the environment says how they wait."""
    # GNU OpenMP reads it as torch is imported. By default it spins for milliseconds: on shared cores a thread
    # that waits has the core of the one it waits for, and a step takes more than twice as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


app = typer.Typer(
    name="spotlight",
    callback=wait_for_threads_asleep,
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
    ("dashboard", dashboard, "Run"),
    ("audit", audit, "Run"),
    ("eval", evaluate, "Use"),
    ("generate", generate, "Use"),
    ("export", export, "Use"),
    ("card", card, "Use"),
    ("report", report, "Use"),
    ("score", score, "Use"),
    ("simulate", simulate, "Plan"),
    ("plan", plan, "Plan"),
    ("calibrate", calibrate, "Plan"),
    ("prices", prices, "Plan"),
    ("traces", traces, "Plan"),
    ("prompts", prompts, "Use"),
    ("notices", notices, "Look up"),
    ("config", config, "Look up"),
    ("tiny", tiny, "Look up"),
    ("doctor", doctor, "Look up"),
    ("version", version, "Look up"),
):
    app.command(
        name,
        rich_help_panel=panel,
        no_args_is_help=name
        in {"eval", "generate", "export", "card", "audit", "plan", "calibrate", "report", "tiny", "score"},
    )(command)

app.add_typer(rewards_app, name="rewards", rich_help_panel="Look up")
