"""Several server processes on one port, each with connections of its own to every engine."""
