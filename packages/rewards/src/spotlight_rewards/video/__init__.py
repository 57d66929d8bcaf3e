"""Rewards that measure a video itself, whatever its prompt."""
