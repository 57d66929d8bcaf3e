"""Nodes of the Ray cluster: hardware facts, preemption notices, drains."""
