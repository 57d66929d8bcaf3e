"""On which terms a run goes on, and forks."""
