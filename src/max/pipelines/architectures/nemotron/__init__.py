"""Nemotron, of NVIDIA."""
