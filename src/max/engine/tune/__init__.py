"""Measures the row thresholds of products on this machine."""
