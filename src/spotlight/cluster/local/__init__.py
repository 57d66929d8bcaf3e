"""A Ray cluster emulated on this machine, with spot nodes driven by a trace."""
