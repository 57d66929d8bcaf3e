"""Preemption notices: what the cloud says about this node's end, as a small typed stream."""
