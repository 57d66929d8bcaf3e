"""A Ray cluster on this machine whose nodes come and go by a trace."""
