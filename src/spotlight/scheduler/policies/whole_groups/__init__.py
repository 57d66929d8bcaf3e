"""Rewards that compare the samples of a group get them together."""
