"""Phi, of Microsoft."""
