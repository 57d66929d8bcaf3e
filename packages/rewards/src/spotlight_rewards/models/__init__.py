"""What rewards share that score with a model of their own."""
