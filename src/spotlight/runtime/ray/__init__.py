"""Runs on Ray: nodes that come and go, and the processes on them."""
