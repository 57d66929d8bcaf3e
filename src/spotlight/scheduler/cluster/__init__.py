"""Workers, sequence-parallel groups, drains and recovery, as the controller sees them."""
