"""Machines in the controller: which there are, what each does, and how many are wanted."""
