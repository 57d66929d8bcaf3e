"""Seed exploration: which seeds to preview at idle times, and which of them form a group."""
