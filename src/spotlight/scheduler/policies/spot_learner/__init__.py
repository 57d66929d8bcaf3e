"""A learner that has no nodes of its own: it is formed on spot nodes, or one on demand, and moves."""
