"""On-demand and spot GPU prices from cloud APIs or the built-in table, with their age."""
