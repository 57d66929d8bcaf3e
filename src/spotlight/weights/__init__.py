"""Policy versions on their way to workers: bundles, one download per node, and full weights from a peer."""
