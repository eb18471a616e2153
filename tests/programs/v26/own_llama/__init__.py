"""A decoder of its own: a network of `max.nn` layers, a paged cache, a pipeline model."""

from .arch import own_llama_arch

ARCHITECTURES = [own_llama_arch]

__all__ = ["ARCHITECTURES", "own_llama_arch"]
