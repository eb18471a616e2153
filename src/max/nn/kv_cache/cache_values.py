"""The values of a paged cache inside a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import GenericAlias
from typing import Any

from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, Dim, TensorType, TensorValue, Type, Value
from max.nn.kv_cache.cache_params import KVCacheParams

__all__ = ["PagedCacheValues", "paged_cache_types", "symbolic_values"]


@dataclass
class PagedCacheValues:
    """A paged cache in a graph; see :class:`max.nn.kv_cache.RaggedKVCacheInputs` for its tensors.

    Args:
        kv_blocks: The pages.
        cache_lengths: The number of cached tokens of each sequence.
        lookup_table: The pages of each sequence.
        max_lengths: The maximum numbers of new and of cached tokens of a sequence, one row per step.
        slots: If recurrent layers have states, the slot of each sequence.
        states: The state buffers ``[slots, layers, …]``, in the order of `KVCacheParams.states`.
        groups: The pages and the page table of each further group of layers, in the order of `KVCacheParams.groups`.
        other_blocks: For each group, the pages of further devices; each device holds its own heads of the same tokens.
        ancestors: The new rows of its sequence that each row of a tree of drafted tokens sees; None: there are none.
    """

    kv_blocks: BufferValue
    cache_lengths: TensorValue
    lookup_table: TensorValue
    max_lengths: TensorValue
    slots: TensorValue | None = None
    states: tuple[BufferValue, ...] = ()
    groups: tuple[tuple[BufferValue, TensorValue], ...] = ()
    other_blocks: tuple[tuple[BufferValue, ...], ...] = ()
    ancestors: TensorValue | None = None

    # programs may subscript the class with the types of its fields
    __class_getitem__ = classmethod(GenericAlias)

    @property
    def max_prompt_length(self) -> TensorValue:
        """The maximum number of new tokens of a sequence, uint32 ``[1]``, on the CPU."""
        return self.max_lengths[0, 0:1]

    @property
    def max_cache_length(self) -> TensorValue:
        """The maximum number of cached tokens of a sequence, uint32 ``[1]``, on the CPU."""
        return self.max_lengths[0, 1:2]

    def flatten(self) -> list[Value[Any]]:
        """The values; see :attr:`values`."""
        return self.values

    def __tree_flatten__(self) -> tuple[list[Value[Any]], int]:
        """The values, as children of a node of `max.tree`."""
        return self.values, len(self.groups)

    @classmethod
    def __tree_unflatten__(cls, groups: int, children: Iterable[Value[Any]]) -> PagedCacheValues:
        """The cache of values, for `max.tree`.

        Args:
            groups: The number of groups of layers after the first one.
            children: The values.
        """
        return cls.of(children, groups)

    @classmethod
    def of(
        cls, values: PagedCacheValues | Iterable[Value[Any]], groups: int = 0
    ) -> PagedCacheValues:
        """Builds a cache from its values, in the order of the graph inputs.

        Args:
            values: The values in the order of :attr:`values`; a cache is returned as it is.
            groups: The number of groups of layers after the first one.

        Raises:
            ValueError: The number of values is wrong: expected four, two more per further group, one more per group and
                further device, and with trees one, with states at least two more.
            TypeError: The first value is not a buffer, or one of the next three is not a tensor.
        """
        if isinstance(values, PagedCacheValues):
            return values
        fields = list(values)
        # the first group's pages, a buffer for each device, end at its first tensor
        devices = next((i for i, v in enumerate(fields) if not isinstance(v, BufferValue)), 1)
        num_pages_values = (3 + devices) + (1 + devices) * groups
        more = len(fields) - num_pages_values
        # one more are the ancestors of rows; a model with states has no trees
        has_trees = more == 1 and isinstance(fields[-1], TensorValue)
        if not devices or more < 0 or (more == 1 and not has_trees):
            raise ValueError(f"a paged cache has {num_pages_values} values, got {len(fields)}")
        lengths, table, maxima = (value.tensor for value in fields[devices : devices + 3])
        # three tensors follow the pages of the first group, one page table those of each other
        starts = [0, *range(3 + devices, num_pages_values, 1 + devices)]
        pages = [[value.buffer for value in fields[i : i + devices]] for i in starts]
        tables = [fields[i + devices].tensor for i in starts[1:]]
        cache = cls(
            pages[0][0],
            lengths,
            table,
            maxima,
            groups=tuple(
                (group_pages[0], t) for group_pages, t in zip(pages[1:], tables, strict=True)
            ),
            other_blocks=tuple(tuple(group_pages[1:]) for group_pages in pages)
            if devices > 1
            else (),
        )
        if not more:
            return cache
        if has_trees:
            return replace(cache, ancestors=fields[-1].tensor)
        slots, *states = fields[num_pages_values:]
        return replace(cache, slots=slots.tensor, states=tuple(s.buffer for s in states))

    def __iter__(self) -> Iterator[Value[Any]]:
        yield from (self.kv_blocks, self.cache_lengths, self.lookup_table, self.max_lengths)

    @property
    def values(self) -> list[Value[Any]]:
        """The values of the first group, those of each further group, then the slots and states, or the ancestors of
        rows, if there are any.

        The pages of a group are listed by device, the first device first.
        """
        blocks, *tables = self
        others = self.other_blocks or ((),) * (1 + len(self.groups))
        groups = [
            value
            for (first_pages, table), more in zip(self.groups, others[1:], strict=True)
            for value in (first_pages, *more, table)
        ]
        states = () if self.slots is None else (self.slots, *self.states)
        trees = () if self.ancestors is None else (self.ancestors,)
        return [blocks, *others[0], *tables, *groups, *states, *trees]

    def group(self, index: int) -> PagedCacheValues:
        """The cache of one group of layers, as a separate cache.

        Args:
            index: The group; 0 is the first one.

        Raises:
            IndexError: There is no such group.
        """
        others = self.other_blocks[index : index + 1]
        if index == 0:
            return replace(self, groups=(), other_blocks=others) if self.groups else self
        blocks, table = self.groups[index - 1]
        return replace(self, kv_blocks=blocks, lookup_table=table, groups=(), other_blocks=others)

    def on_device(self, index: int, device: DeviceRef) -> PagedCacheValues:
        """The pages on a device, with the page tables copied to it; recurrent states are on the first device only.

        Args:
            index: The index of the device.
            device: The device.

        Raises:
            IndexError: The cache has fewer devices.
        """
        if index == 0:
            return replace(self, other_blocks=())
        blocks = self.other_blocks[0][index - 1]
        lengths, table = self.cache_lengths.to(device), self.lookup_table.to(device)
        groups = [
            (pages[index - 1], own_table.to(device))
            for pages, (_, own_table) in zip(self.other_blocks[1:], self.groups, strict=True)
        ]
        return PagedCacheValues(blocks, lengths, table, self.max_lengths, groups=tuple(groups))

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
    params: KVCacheParams,
    num_layers: int,
    device: DeviceRef,
    batch: str | Dim = "batch",
    other_devices: Iterable[DeviceRef] = (),
) -> list[Type[Any]]:
    """The types of the graph inputs for a paged cache, in the order of ``RaggedKVCacheInputs``.

    Args:
        params: The parameters of the cache.
        num_layers: The number of layers of the first group.
        device: The device of the pages, and of the tables.
        batch: The dimension of the batch.
        other_devices: Further devices with pages.
    """
    if params.page_size is None:
        raise ValueError("paged_cache_types: the cache has no page_size")
    slots = [TensorType(DType.uint32, [batch], device)] if params.states else []
    states = [
        BufferType(state.dtype, ["total_num_slots", state.layers, *state.shape], device)
        for state in params.states
    ]
    trees = [TensorType(DType.uint64, ["tree_rows"], device)] if params.verifies_trees else []
    # page tables share one length, the numbers of pages differ
    table = TensorType(DType.uint32, [batch, "max_num_pages"], device)
    devices = [device, *other_devices]
    groups: list[Type[Any]] = []
    for index, group in enumerate(params.groups, 1):
        shape = params.group(index), group.layers, f"total_num_pages_{index}"
        groups += [*(_pages_type(*shape, ref) for ref in devices), table]
    return [
        *(_pages_type(params, num_layers, "total_num_pages", ref) for ref in devices),
        TensorType(DType.uint32, [batch], device),
        table,
        TensorType(DType.uint32, ["steps_remaining", 2], device),
        *groups,
        *slots,
        *states,
        *trees,
    ]


def _pages_type(
    params: KVCacheParams, num_layers: int, num_pages: str, device: DeviceRef
) -> BufferType:
    """The type of a group's pages."""
    assert params.page_size is not None
    # keys and values, or latents for both
    kinds = 1 if params.is_mla else 2
    heads, row = params.n_kv_heads_per_device, params.stored_head_dim
    shape = [num_pages, kinds, num_layers, params.page_size, heads, row]
    return BufferType(params.dtype, shape, device)


def symbolic_values(params: KVCacheParams) -> PagedCacheValues:
    """The types of the graph inputs for a paged cache, as the fields of one object.

    Args:
        params: The parameters of the cache, with `num_layers` and `devices`.

    Raises:
        ValueError: `num_layers` or `devices` is not set, or there are several devices.
    """
    devices = params.devices or ()
    if params.num_layers is None or not devices:
        raise ValueError(
            "KVCacheParams: the graph's inputs need num_layers and devices; KVCacheConfig.to_params takes both"
        )
    if len(devices) > 1:
        raise ValueError(
            f"KVCacheParams: {len(devices)} devices; get_symbolic_inputs and flattened_kv_inputs are for one"
        )
    types: Any = paged_cache_types(params, params.num_layers, devices[0])
    groups, slots = 4 + 2 * len(params.groups), bool(params.states)
    trees = params.verifies_trees
    return PagedCacheValues(
        *types[:4],
        groups=tuple(zip(types[4:groups:2], types[5:groups:2], strict=True)),
        slots=types[groups] if slots else None,
        states=() if trees else tuple(types[groups + 1 :]),
        ancestors=types[groups] if trees else None,
    )
