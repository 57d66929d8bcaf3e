"""Rollout workers as Ray actors."""
