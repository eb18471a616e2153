"""Sampling: the parameters of a batch as tensors, the graphs that pick its tokens, log-probabilities."""
