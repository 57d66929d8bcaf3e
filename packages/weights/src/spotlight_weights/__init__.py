"""Tensors on their way to other processes: bundles, one download per node, whole models from a peer."""

__version__ = "0.1.0"
