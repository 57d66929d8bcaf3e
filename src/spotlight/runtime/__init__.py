"""Drivers: they carry out the controller's effects."""
