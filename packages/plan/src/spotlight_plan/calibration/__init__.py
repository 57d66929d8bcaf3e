"""Cost profiles measured in real runs, and runs predicted by the simulator."""
