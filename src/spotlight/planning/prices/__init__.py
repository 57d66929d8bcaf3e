"""Prices of GPUs on demand and on spot, from cloud APIs or the built-in table, with their age."""
