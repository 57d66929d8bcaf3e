"""Sequence parallelism (Ulysses): several processes of one node denoise the same rollouts together."""
