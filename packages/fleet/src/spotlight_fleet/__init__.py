"""Nodes that come and go: preemption notices, spot traces, facts about GPU types."""

__version__ = "0.1.0"
