"""Samples are trained in parts, as they arrive."""
