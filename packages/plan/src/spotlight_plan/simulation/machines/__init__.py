"""Machines in virtual time: booting, on demand, and which of their GPUs train."""
