"""Drivers: they carry out the controller's effects in a real world."""
