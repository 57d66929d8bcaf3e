"""How fast a device is, and what a step of it did: rates, what cards can at best, traces."""
