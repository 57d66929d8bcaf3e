"""Prompt files and the prompts of a run."""
