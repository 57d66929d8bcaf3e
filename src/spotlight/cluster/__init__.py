"""Training on Ray: the head, the learner group, rollout workers, and nodes that come and go."""
