"""Simulation results as tables in the terminal and as self-contained HTML pages."""
