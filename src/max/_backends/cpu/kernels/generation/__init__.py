"""Sampling of tokens and the state of a decoding step."""
