"""Plan a cluster before renting it: scenarios, prices, strategy comparison, and search."""

__version__ = "0.1.0"
