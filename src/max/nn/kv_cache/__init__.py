"""Caches of keys and values: their parameters, their tensors, their values in graphs."""

from max._earlier import earlier_names
from max.nn.kv_cache.cache_params import CacheGroup, KVCacheParams, KVCacheStrategy
from max.nn.kv_cache.cache_values import PagedCacheValues, paged_cache_types
from max.nn.kv_cache.manager import KVCacheInputs, KVCacheInputsSequence, RaggedKVCacheInputs
from max.nn.kv_cache.recurrent_state import RecurrentState

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

__getattr__ = earlier_names(__name__)
