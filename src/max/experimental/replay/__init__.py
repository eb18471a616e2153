"""Traces of a program's calls, and the comparison of its next run with them."""
