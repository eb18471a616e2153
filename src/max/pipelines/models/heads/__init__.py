"""Heads that draft tokens from hidden states of a model, in the cache of the model."""
