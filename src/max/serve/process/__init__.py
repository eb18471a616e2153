"""The server as a process: its settings, its start, its end."""
