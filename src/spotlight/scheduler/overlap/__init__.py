"""Overlapping generation and training: batches in parts, trainer rollout budgets, look-ahead."""
