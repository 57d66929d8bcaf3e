"""Algorithms that learn from preferences within a group."""
