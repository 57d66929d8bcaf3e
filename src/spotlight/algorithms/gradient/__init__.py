"""Algorithms that follow the gradient of a reward."""
