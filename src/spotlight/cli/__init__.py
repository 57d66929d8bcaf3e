"""Commands: one file each, thin over the library."""
