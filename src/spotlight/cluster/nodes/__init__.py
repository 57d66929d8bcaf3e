"""Nodes of the Ray cluster: what they have, preemption notices, drains."""
