"""Transformers."""

from max.nn.transformer.transformer import ReturnLogits, Transformer, TransformerBlock

__all__ = ["ReturnLogits", "Transformer", "TransformerBlock"]
