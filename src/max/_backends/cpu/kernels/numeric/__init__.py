"""Scans, Fourier transforms and random numbers."""
