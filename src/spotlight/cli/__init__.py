"""Commands: one file each, thin over the other rooms."""
