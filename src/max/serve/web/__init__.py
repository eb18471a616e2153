"""The chat page at ``/``: one file, no other host."""
