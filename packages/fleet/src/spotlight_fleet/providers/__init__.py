"""Who adds and drops nodes: shell commands, Kubernetes, a market that is emulated."""
