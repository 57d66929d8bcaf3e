"""A Ray cluster emulated on this machine, with spot nodes that a trace takes away."""
