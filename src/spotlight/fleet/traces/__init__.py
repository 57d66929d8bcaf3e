"""When spot nodes come and go: canonical events, readers, a generator, statistics."""
