"""Plan a cluster before renting it: scenarios, prices, strategies side by side, and the search for the
cheapest one."""
