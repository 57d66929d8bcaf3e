"""Reward functions, and the pool that runs each in its own process."""

__version__ = "0.1.0"
