"""Sampling: the parameters of a batch as tensors, and the graphs that pick its tokens."""
