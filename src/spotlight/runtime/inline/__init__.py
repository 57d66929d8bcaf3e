"""The inline driver: one process (or the ranks of one ``torchrun``), one engine, one learner."""
