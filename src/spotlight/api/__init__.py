"""What scripts and notebooks call: :func:`spotlight.train` and :func:`spotlight.open`."""
