"""The values of a paged cache inside a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
        slots: Where recurrent layers have states: the slot of each sequence.
        states: Their buffers ``[slots, layers, …]``, in the order of `KVCacheParams.states`.
        groups: The pages and the page table of each further group of layers, in the order of `KVCacheParams.groups`.
    """

    kv_blocks: BufferValue
    cache_lengths: TensorValue
    lookup_table: TensorValue
    max_lengths: TensorValue
    slots: TensorValue | None = None
    states: tuple[BufferValue, ...] = ()
    groups: tuple[tuple[BufferValue, TensorValue], ...] = ()

    @classmethod
    def of(
        cls, values: PagedCacheValues | Iterable[Value[Any]], groups: int = 0
    ) -> PagedCacheValues:
        """A cache out of its values, as the inputs of a graph give them.

        Args:
            values: The values in the order of :attr:`values`; a cache is returned as it is.
            groups: The number of groups of layers after the first one.

        Raises:
            ValueError: There are not four values, two more for each group, and two or more with states.
            TypeError: The first is not a buffer, or one of the next three not a tensor.
        """
        if isinstance(values, PagedCacheValues):
            return values
        fields, own = list(values), 4 + 2 * groups
        if len(fields) not in (own, *range(own + 2, len(fields) + 1)):
            raise ValueError(f"a paged cache has {own} values, got {len(fields)}")
        blocks, *tensors = fields[:4]
        lengths, table, maxima = (t.tensor for t in tensors)
        more = [(fields[i].buffer, fields[i + 1].tensor) for i in range(4, own, 2)]
        cache = cls(blocks.buffer, lengths, table, maxima, groups=tuple(more))
        if len(fields) == own:
            return cache
        slots, *states = fields[own:]
        return replace(cache, slots=slots.tensor, states=tuple(s.buffer for s in states))

    def __iter__(self) -> Iterator[Value[Any]]:
        yield from (self.kv_blocks, self.cache_lengths, self.lookup_table, self.max_lengths)

    @property
    def values(self) -> list[Value[Any]]:
        """The four values of the first group, two of each further one, then the slots and the states where there are some."""
        groups = [value for group in self.groups for value in group]
        return [*self, *groups, *(() if self.slots is None else (self.slots, *self.states))]

    def group(self, index: int) -> PagedCacheValues:
        """The cache of one group of layers, as a cache of its own.

        Args:
            index: The group; 0 is the first one.

        Raises:
            IndexError: There is no such group.
        """
        if index == 0:
            return replace(self, groups=()) if self.groups else self
        blocks, table = self.groups[index - 1]
        return replace(self, kv_blocks=blocks, lookup_table=table, groups=())

    def state(self, params: KVCacheParams, name: str) -> tuple[BufferValue, TensorValue]:
        """The buffer of a recurrent state, and the slots of the batch.

        Args:
            params: The parameters of the cache.
            name: The state's name.

        Raises:
            KeyError: The cache has no such state.
        """
        names = [state.name for state in params.states]
        if self.slots is None or name not in names or len(names) != len(self.states):
            raise KeyError(f"the cache has {len(self.states)} of the states {names}, not {name!r}")
        return self.states[names.index(name)], self.slots

    @property
    def types(self) -> list[Type[Any]]:
        """The types of the values."""
        return [value.type for value in self.values]


def paged_cache_types(
    params: KVCacheParams, num_layers: int, device: DeviceRef, batch: str | Dim = "batch"
) -> list[Type[Any]]:
    """The types of a graph's inputs for a paged cache, in the order of ``RaggedKVCacheInputs``.

    Args:
        params: The parameters of the cache.
        num_layers: The number of layers that have a cache, of the first group.
        device: The device of the pages.
        batch: The dimension of the batch.
    """
    if params.page_size is None:
        raise ValueError("paged_cache_types: the cache has no page_size")
    slots = [TensorType(DType.uint32, [batch], device)] if params.states else []
    states = [
        BufferType(state.dtype, ["total_num_slots", state.layers, *state.shape], device)
        for state in params.states
    ]
    # page tables are of one length, pools are not
    table = TensorType(DType.uint32, [batch, "max_num_pages"], device)
    groups: list[Type[Any]] = []
    for index, group in enumerate(params.groups, 1):
        pages = f"total_num_pages_{index}"
        groups += [_pages_type(params.group(index), group.layers, pages, device), table]
    return [
        _pages_type(params, num_layers, "total_num_pages", device),
        TensorType(DType.uint32, [batch], device),
        table,
        TensorType(DType.uint32, ["steps_remaining", 2], DeviceRef.CPU()),
        *groups,
        *slots,
        *states,
    ]


def _pages_type(
    params: KVCacheParams, num_layers: int, num_pages: str, device: DeviceRef
) -> BufferType:
    """The type of a group's pages."""
    assert params.page_size is not None
    kinds = 1 if params.is_mla else 2
    heads, row = params.n_kv_heads_per_device, params.stored_head_dim
    shape = [num_pages, kinds, num_layers, params.page_size, heads, row]
    return BufferType(params.dtype, shape, device)
