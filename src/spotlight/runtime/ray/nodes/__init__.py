"""Nodes of a Ray cluster: found, watched, told of their end, and what they are to the controller."""
