"""Micro-kernels over register tiles and AMX tiles, and the column strips that products store."""
