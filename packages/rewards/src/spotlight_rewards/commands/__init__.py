"""Commands about rewards and the prompts that they score: of `spotlight-rewards`, and of `spotlight`."""

from __future__ import annotations

import typer

from spotlight_rewards.commands.prompts_command import prompts
from spotlight_rewards.commands.rewards_command import rewards_app
from spotlight_rewards.commands.score_command import score


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("score", rich_help_panel="Use", no_args_is_help=True)(score)
    app.command("prompts", rich_help_panel="Use")(prompts)
    app.add_typer(rewards_app, name="rewards", rich_help_panel="Look up")
