"""The run directory: ledger, checkpoints, metrics, pictures and summary of one run."""
