"""Documented path of the kinds of pipelines."""
