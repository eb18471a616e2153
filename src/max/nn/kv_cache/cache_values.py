"""The values of a paged cache inside a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, Dim, TensorType, TensorValue, Type, Value
from max.nn.kv_cache.cache_params import KVCacheParams

__all__ = ["PagedCacheValues", "paged_cache_types"]


@dataclass
class PagedCacheValues:
    """A paged cache in a graph; see :class:`max.nn.kv_cache.RaggedKVCacheInputs` for its tensors.

    Args:
        kv_blocks: The pages.
        cache_lengths: The tokens of each sequence that are cached already.
        lookup_table: The pages of each sequence.
        max_lengths: The most new and the most cached tokens of a sequence, a row a step.
    """

    kv_blocks: BufferValue
    cache_lengths: TensorValue
    lookup_table: TensorValue
    max_lengths: TensorValue

    @classmethod
    def of(cls, values: PagedCacheValues | Iterable[Value[Any]]) -> PagedCacheValues:
        """A cache out of its four values, as the inputs of a graph give them.

        Args:
            values: The values in the order of the fields; a cache is returned as it is.

        Raises:
            ValueError: There are not four values.
            TypeError: The first is not a buffer, or another one not a tensor.
        """
        if isinstance(values, PagedCacheValues):
            return values
        fields = list(values)
        if len(fields) != 4:
            raise ValueError(f"a paged cache has 4 values, got {len(fields)}")
        blocks, *tensors = fields
        return cls(blocks.buffer, *(t.tensor for t in tensors))

    def __iter__(self) -> Iterator[Value[Any]]:
        yield from (self.kv_blocks, self.cache_lengths, self.lookup_table, self.max_lengths)

    @property
    def types(self) -> list[Type[Any]]:
        """The types of the values."""
        return [value.type for value in self]


def paged_cache_types(
    params: KVCacheParams, num_layers: int, device: DeviceRef, batch: str | Dim = "batch"
) -> list[Type[Any]]:
    """The types of a graph's inputs for a paged cache, in the order of ``RaggedKVCacheInputs``.

    Args:
        params: The parameters of the cache.
        num_layers: The number of layers that have a cache.
        device: The device of the pages.
        batch: The dimension of the batch.
    """
    if params.page_size is None:
        raise ValueError("paged_cache_types: the cache has no page_size")
    return [
        BufferType(
            params.dtype,
            [
                "total_num_pages",
                1 if params.is_mla else 2,
                num_layers,
                params.page_size,
                params.n_kv_heads_per_device,
                params.head_dim,
            ],
            device,
        ),
        TensorType(DType.uint32, [batch], device),
        TensorType(DType.uint32, [batch, "max_num_pages"], device),
        TensorType(DType.uint32, ["steps_remaining", 2], DeviceRef.CPU()),
    ]
