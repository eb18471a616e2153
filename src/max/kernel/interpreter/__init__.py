"""Kernels in plain Python over NumPy arrays."""
