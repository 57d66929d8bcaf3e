"""Rollouts of the next iteration, before this one is trained."""
