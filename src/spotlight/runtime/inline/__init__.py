"""The inline driver: one process, one engine, one learner."""
