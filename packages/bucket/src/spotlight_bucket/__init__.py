"""Runs in a bucket: a replicator beside the run, and copies to work on and to read."""

__version__ = "0.1.0"
