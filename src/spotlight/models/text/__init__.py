"""Prompts to conditions, through a disk cache."""
