"""Fault injection on the simulated cluster: `python -m tests.simulation.check --help`."""
