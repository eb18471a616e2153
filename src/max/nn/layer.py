"""Base classes of layers: weights by name, state dicts, subgraphs, hooks."""

from __future__ import annotations

from max._names import lazy_names
from max.nn.layers.layer import Layer, add_layer_hook, clear_hooks
from max.nn.layers.layer import remove_layer_hook as remove_layer_hook
from max.nn.layers.layer_list import LayerList
from max.nn.layers.module import Module, recursive_named_layers
from max.nn.layers.sharding import Shardable

__all__ = [
    "Layer",
    "LayerList",
    "Module",
    "Shardable",
    "add_layer_hook",
    "clear_hooks",
    "recursive_named_layers",
]

__getattr__ = lazy_names(__name__)
