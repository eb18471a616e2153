"""Mamba and Jamba."""
