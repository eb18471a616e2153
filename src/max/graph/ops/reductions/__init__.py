"""Reductions, scans, sorts and normalizations along axes."""
