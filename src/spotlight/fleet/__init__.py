"""Nodes, GPU types, spot traces and preemption notices."""
