"""Fault injection on the simulated cluster: run `python -m tests.simulation.check --help`."""
