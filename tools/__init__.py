"""Maintainers' programs, not installed."""
