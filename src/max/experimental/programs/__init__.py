"""Recorded calls as programs: their arguments, types and sizes, the graphs made of them, compiled programs."""
