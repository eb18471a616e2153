"""The kinds of pipelines."""
