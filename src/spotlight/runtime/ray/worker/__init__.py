"""Rollout workers: their processes, and the head's pool of them."""
