"""Models that answer the requests of a command, one at a time."""
