"""Ops of language models in NumPy: the paged cache, attention, experts, recurrent layers, sampling."""
