"""Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names

if TYPE_CHECKING:
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

_MODULES = {
    "distributed_transformer": "DistributedTransformer DistributedTransformerBlock",
    "transformer": "ReturnHiddenStates ReturnLogits Transformer TransformerBlock",
}
"""The names of each module."""
_WHERE = {
    name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()
}

__all__ = [
    "DistributedTransformer",
    "DistributedTransformerBlock",
    "ReturnHiddenStates",
    "ReturnLogits",
    "Transformer",
    "TransformerBlock",
]

__getattr__ = lazy_names(__name__, _WHERE, submodules=True)
