"""Limits of chat templates: the work and the memory that rendering one may take."""
