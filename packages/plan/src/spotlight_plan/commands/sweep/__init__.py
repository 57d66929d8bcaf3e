"""``spotlight sweep``: several runs of one configuration."""
