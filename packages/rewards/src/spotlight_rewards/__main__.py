"""``python -m spotlight_rewards``."""

from spotlight_rewards.commands.main import app

app()
