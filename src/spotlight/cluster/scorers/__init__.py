"""Reward processes on the nodes of a cluster."""
