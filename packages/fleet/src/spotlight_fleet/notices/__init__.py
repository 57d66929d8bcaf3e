"""Preemption notices from the cloud for this node."""
