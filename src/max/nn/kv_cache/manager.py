"""The input tensors of a KV cache for one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from types import GenericAlias

from max.driver import Tensor

__all__ = ["KVCacheInputs", "KVCacheInputsSequence", "RaggedKVCacheInputs"]


class KVCacheInputs:
    """Base of the input tensors of a cache, one field per tensor.

    Subclasses are dataclasses. Iteration yields the tensors in the order of the fields, with nested inputs flattened:
    the order of the graph inputs.
    """

    # programs may subscript the class with the types of its fields
    __class_getitem__ = classmethod(GenericAlias)

    def flatten(self) -> list[Tensor]:
        """The tensors, in the order of the graph inputs."""
        return list(self)

    def __tree_flatten__(self) -> tuple[list[Tensor], None]:
        """The tensors, as children of a node of `max.tree`."""
        return list(self), None

    def __iter__(self) -> Iterator[Tensor]:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, KVCacheInputs):
                yield from value
            elif isinstance(value, Sequence):
                for item in value:
                    yield from (item if isinstance(item, KVCacheInputs) else (item,))
            else:
                raise TypeError(
                    f"{type(self).__name__}: {field.name} is {value!r}; expected a Tensor, "
                    "KVCacheInputs, or a sequence of them"
                )

    def __getitem__(self, index: int) -> Tensor:
        return list(self)[index]

    def __len__(self) -> int:
        return sum(1 for _ in self)  # list() calls __len__ as a size hint


@dataclass
class RaggedKVCacheInputs(KVCacheInputs):
    """The tensors of a paged cache for a ragged batch.

    Args:
        blocks: The pages ``[pages, 2, layers, page_size, kv_heads, stored_head_dim]``, keys then values;
            the execution changes them.
        cache_lengths: The number of cached tokens of each sequence, uint32 ``[batch]``.
        lookup_table: The pages of each sequence, uint32 ``[batch, max_pages]``.
        max_lengths: One row per step, uint32 ``[steps, 2]``: the maximum numbers of new and of cached tokens of a
            sequence.
        slots: If recurrent layers have states, the slot of each sequence, uint32 ``[batch]``.
        states: The states ``[slots, layers, …]``; the execution changes them.
        group_blocks: The pages of further groups of layers, see `KVCacheParams.groups`; the execution changes them.
        group_tables: Their page tables, as ``lookup_table``.
        other_blocks: For each group, the pages of further devices; each device holds its own heads of the same tokens.
        ancestors: For graphs that verify trees of drafted tokens, uint64: empty, or for each row of the batch a bit for
            each new row of its sequence that it sees, itself included; 0 for a row that sees all rows before it.
    """

    blocks: Tensor
    cache_lengths: Tensor
    lookup_table: Tensor
    max_lengths: Tensor
    slots: Tensor | None = None
    states: Sequence[Tensor] = ()
    group_blocks: Sequence[Tensor] = ()
    group_tables: Sequence[Tensor] = ()
    other_blocks: Sequence[Sequence[Tensor]] = ()
    ancestors: Tensor | None = None

    @property
    def kv_blocks(self) -> Tensor:
        """The pages: `blocks`."""
        return self.blocks

    @property
    def inputs(self) -> list[RaggedKVCacheInputs]:
        """The inputs of each replica of the model: a list with this object, as there is one replica."""
        return [self]

    def __iter__(self) -> Iterator[Tensor]:
        # without further devices, each group only has the pages of the first one
        others = self.other_blocks or ((),) * (1 + len(self.group_blocks))
        yield from (self.blocks, *others[0])
        yield from (self.cache_lengths, self.lookup_table, self.max_lengths)
        for blocks, table, more in zip(
            self.group_blocks, self.group_tables, others[1:], strict=True
        ):
            yield from (blocks, *more, table)
        if self.slots is not None:
            yield self.slots
            yield from self.states
        if self.ancestors is not None:
            yield self.ancestors


@dataclass
class KVCacheInputsSequence(KVCacheInputs):
    """The inputs of several caches, or of the parts of one cache on several devices.

    Args:
        kv_cache_inputs: The inputs, in order.
    """

    kv_cache_inputs: Sequence[KVCacheInputs]
