"""Nodes, prices and preemption notices."""
