"""Gemma, of Google."""
