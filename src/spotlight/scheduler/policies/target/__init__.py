"""A deadline, a budget or both, held by the number of spot nodes."""
