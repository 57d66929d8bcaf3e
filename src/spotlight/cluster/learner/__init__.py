"""The learner on Ray: one actor per rank, and the group that drives them."""
