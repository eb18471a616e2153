"""Ops of language models: the paged cache, attention, experts, recurrent layers, sampling."""
