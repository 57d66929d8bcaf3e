"""A page on one or several runs, read from their directories without writing to them."""

__version__ = "0.1.0"
