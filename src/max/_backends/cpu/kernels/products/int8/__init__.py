"""Exact matrix products with 8-bit integer weights."""
