"""The paged KV cache: which page holds what (no tensors), and the tensors themselves."""
