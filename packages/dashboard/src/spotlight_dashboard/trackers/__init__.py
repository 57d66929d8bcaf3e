"""Experiment trackers of others: their packages are extras."""
