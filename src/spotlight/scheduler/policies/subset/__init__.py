"""Some samples of a group are trained, and groups without a signal are not."""
