"""The paged KV cache: which page holds what (no tensors), and the tensors themselves."""

from max._earlier import earlier_names

__getattr__ = earlier_names(__name__)
