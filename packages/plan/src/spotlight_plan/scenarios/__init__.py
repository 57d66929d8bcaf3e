"""Scenario and profile files, and the simulations they describe."""
