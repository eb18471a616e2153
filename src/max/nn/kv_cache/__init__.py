"""Caches of keys and values: their parameters, their tensors, their values in graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names

if TYPE_CHECKING:
    from max.nn.kv_cache.cache_params import CacheGroup, KVCacheParams, KVCacheStrategy
    from max.nn.kv_cache.cache_values import PagedCacheValues, paged_cache_types
    from max.nn.kv_cache.manager import KVCacheInputs, KVCacheInputsSequence, RaggedKVCacheInputs
    from max.nn.kv_cache.recurrent_state import RecurrentState

_MODULES = {
    "cache_params": "CacheGroup KVCacheParams KVCacheStrategy",
    "cache_values": "PagedCacheValues paged_cache_types",
    "manager": "KVCacheInputs KVCacheInputsSequence RaggedKVCacheInputs",
    "recurrent_state": "RecurrentState",
}
"""The names of each module."""
_WHERE = {
    name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()
}

__all__ = [
    "CacheGroup",
    "KVCacheInputs",
    "KVCacheInputsSequence",
    "KVCacheParams",
    "KVCacheStrategy",
    "PagedCacheValues",
    "RaggedKVCacheInputs",
    "RecurrentState",
    "paged_cache_types",
]

__getattr__ = lazy_names(__name__, _WHERE, submodules=True)
