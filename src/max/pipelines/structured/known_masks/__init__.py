"""Masks that are known without a computation, as those within a string of JSON."""
