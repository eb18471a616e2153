"""Gather, scatter, selection, sorting and data movement."""
