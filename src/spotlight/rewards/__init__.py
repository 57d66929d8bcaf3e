"""Reward functions, and the pool that runs each in its own process."""
