"""Coding agents: their configurations, and the command that starts them."""
