"""Rewards for legible text, whatever reads it: what a prompt wants drawn, and how much of it was read."""
