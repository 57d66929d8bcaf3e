"""The run directory: ledger, checkpoints, metrics, images and summary."""
