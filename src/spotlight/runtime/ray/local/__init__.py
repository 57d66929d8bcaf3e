"""A Ray on this machine, whose nodes come, get notices and are killed."""
