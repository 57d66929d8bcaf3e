"""The learner as ranks that may die: one process each, one group to the head."""
