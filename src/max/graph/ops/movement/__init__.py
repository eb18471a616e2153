"""Ops that move elements: shapes, slices, joins, gathers."""
