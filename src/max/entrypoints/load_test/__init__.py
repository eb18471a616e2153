"""Measures servers with OpenAI's API under load; no packages but Python's own."""
