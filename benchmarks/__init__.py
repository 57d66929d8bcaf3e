"""Measurements, run from the root of a checkout: ``python -m benchmarks.cluster_scale --help``."""
