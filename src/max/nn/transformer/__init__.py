"""Transformers."""

from max._earlier import earlier_names
from max.nn.transformer.distributed_transformer import (
    DistributedTransformer,
    DistributedTransformerBlock,
)
from max.nn.transformer.transformer import (
    ReturnHiddenStates,
    ReturnLogits,
    Transformer,
    TransformerBlock,
)

__all__ = [
    "DistributedTransformer",
    "DistributedTransformerBlock",
    "ReturnHiddenStates",
    "ReturnLogits",
    "Transformer",
    "TransformerBlock",
]

__getattr__ = earlier_names(__name__)
