"""Spot availability traces: events, readers, a generator, statistics."""
