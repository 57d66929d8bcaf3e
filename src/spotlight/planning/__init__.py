"""Plan a cluster before renting it: scenarios, prices, strategy comparison, and search."""
