"""How fast a run will be, before it has begun: for `--dry-run` and what is shown beside the run."""
