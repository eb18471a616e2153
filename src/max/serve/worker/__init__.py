"""The process that owns the engine, and the asynchronous client that starts it, talks to it and restarts it."""
