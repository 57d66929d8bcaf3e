"""Adds and drops spot nodes so that a run holds its deadline and budget; who provides them."""
