"""Lowers a graph of regions and library ops to launches over its own buffers and symbols."""
