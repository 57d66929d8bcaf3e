"""Policy versions on their way to workers: bundles, one fetch a node, and full weights from a peer."""
