"""Documented path of the sampling graphs."""
