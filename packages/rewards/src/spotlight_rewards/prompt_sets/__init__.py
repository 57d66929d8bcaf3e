"""Training and held-out prompts for rewards, made from templates and a seed."""
