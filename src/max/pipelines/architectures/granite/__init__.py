"""Granite and Bamba, of IBM."""
