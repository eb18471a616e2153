"""The products of a decoder that adapters may change, in the graph that is staged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, Type, ops
from max.nn.attention.multi_latent_attention import ExpansionChange, LatentAttentionWithRope
from max.nn.kernels.adapters import AdapterRows, adapter_rows, add_adapters
from max.nn.kernels.ragged import group_of_rows
from max.nn.layer import Module
from max.nn.layers.experts import RowChange
from max.nn.layers.linear import Linear
from max.pipelines.adapters.layout import (
    EXPERTS,
    HEADS,
    AdapterLayout,
    AdapterShape,
    ExpertPlaces,
    Site,
)
from max.pipelines.models.blocks.experts import DecoderExperts

__all__ = ["AdapterSites", "AdaptedBlock", "adapter_types"]


def adapter_types(
    layout: AdapterLayout, shape: AdapterShape, device: DeviceRef, batch: str
) -> list[Type[Any]]:
    """The types of a graph's inputs for adapters: their memory, their forms, and the slots and scales of requests.

    Args:
        layout: The sites.
        shape: The memory for adapters.
        device: Where the graph runs.
        batch: The symbol of the number of requests.
    """
    return [
        TensorType(shape.dtype, [shape.slots, layout.elements], device),
        TensorType(DType.int32, [shape.slots, layout.count, 2], device),
        TensorType(DType.int32, [batch], device),
        TensorType(DType.float32, [batch], device),
    ]


@dataclass(frozen=True)
class _Batch:
    """The values of adapters in the graph that is staged.

    Args:
        memory: The adapters.
        forms: The form of each site in each slot.
        rows: The rows by slot.
        place: The place of the block.
        experts: The place of the block in a share of an expert, and the slot of each row; empty: there are no experts.
        heads: The place of the block in a share of a head, the heads of all rows sorted by slot and head, and the slots
            and scales of the requests; empty: there are no heads with products of their own.
    """

    memory: TensorValue
    forms: TensorValue
    rows: AdapterRows
    place: TensorValue
    experts: tuple[TensorValue, ...] = ()
    heads: tuple[TensorValue, ...] = ()

    @classmethod
    def of(cls, values: Sequence[TensorValue], has_experts: bool) -> _Batch:
        """The batch with these `values`."""
        memory, forms, *rows = values[:6]
        experts = 7 + 2 * has_experts
        return cls(
            memory,
            forms,
            AdapterRows(*rows),
            values[6],
            tuple(values[7:experts]),
            tuple(values[experts:]),
        )

    @property
    def values(self) -> list[TensorValue]:
        return [self.memory, self.forms, *self.rows, self.place, *self.experts, *self.heads]

    @property
    def head_rows(self) -> AdapterRows:
        """The heads of all rows, sorted by slot and head."""
        return AdapterRows(*self.heads[1:5])


class AdapterSites:
    """Adds the terms of adapters to the products of a decoder while its graph is staged.

    Args:
        model: The decoder; the outputs of its layers are changed.
        shape: The memory for adapters.
    """

    def __init__(self, model: Module, shape: AdapterShape) -> None:
        self.layout, self.shape = AdapterLayout.of(model, shape), shape
        self.used: set[str] = set()
        """The forms of the sites that were staged."""
        self._batch: _Batch | None = None
        self._inputs: tuple[TensorValue, ...] = ()
        modules = {prefix.removesuffix("."): module for prefix, module in model.named_modules()}
        for site in self.layout.sites.values():
            if site.expert is None:
                self._attach(site, modules[site.name])
        for name, module in modules.items():
            if self.layout.experts is None or not name.startswith("layers."):
                continue
            if isinstance(module, DecoderExperts):
                self._attach_experts(name, module, self.layout.experts)
            elif isinstance(module, LatentAttentionWithRope):
                self._attach_heads(name, module, self.layout.experts)

    def _attach(self, site: Site, module: Module) -> None:
        change = self._change_at(site)
        if isinstance(module, Linear):
            module.change_products(change)
        else:
            module.change_outputs(change)

    def _current(self, name: str) -> _Batch:
        """The values of the batch.

        Raises:
            RuntimeError: They are not set.
        """
        if self._batch is None:
            raise RuntimeError(f"{name}: the adapters of the batch are not set")
        return self._batch

    def _change_at(self, site: Site) -> Callable[..., TensorValue]:
        """The change of a product that all tokens take; it may be called with other rows than those of the batch."""
        first = site.name.split(".")
        block = int(first[1]) if first[0] == "layers" else -1
        offset, index = self.layout.places[block]

        def change(x: TensorValue, y: TensorValue, rows: AdapterRows | None = None) -> TensorValue:
            batch = self._current(site.name)
            self.used.add(site.form)
            # a norm's gain and shift change its output
            if site.norm_offset is not None:
                x = y
            # numbers of tokens take the place of rows of inputs
            if site.is_table:
                x = ops.reshape(ops.cast(x, DType.int64), [x.shape[0], 1])
            return add_adapters(
                y,
                x,
                batch.memory,
                batch.forms,
                batch.rows if rows is None else rows,
                batch.place,
                max_rank=site.max_rank,
                inputs=site.inputs,
                site=site.index - index,
                offset=site.offset - offset,
            )

        return change

    def _attach_experts(self, name: str, module: DecoderExperts, experts: ExpertPlaces) -> None:
        """Makes the products of a block's experts take adapters: an expert of a slot is a slot of its own."""
        add = self._change_of_parts(name, EXPERTS, tuple(module.projections), experts)

        def change_of(tokens: TensorValue, chosen: TensorValue) -> RowChange:
            batch = self._current(name)
            own = ops.gather(batch.experts[1], tokens, axis=0)  # [rows]
            scales = ops.gather(batch.rows.scales, tokens, axis=0)
            rows = self._rows_of_parts(own, chosen, scales, tokens.shape[0], experts)
            return lambda number, x, y: add(number, x, y, rows, batch.experts[0])

        module.change_products(change_of)

    def _attach_heads(
        self, name: str, module: LatentAttentionWithRope, experts: ExpertPlaces
    ) -> None:
        """Makes the expansion of latents take adapters: where it is absorbed, a head of a slot is a slot of its own."""
        add = self._change_of_parts(name, HEADS, tuple(module.head_products), experts)
        site = self.layout.sites[f"{name}.kv_b_proj"]
        expand = self._change_at(site)

        def expand_rows(x: TensorValue, y: TensorValue, offsets: TensorValue) -> TensorValue:
            # a row of its own for each cached token, too
            slots, scales = self._current(name).heads[5:]
            return expand(x, y, adapter_rows(slots, scales, offsets, x.shape[0], self.shape.slots))

        def absorb_heads(number: int, x: TensorValue, y: TensorValue) -> TensorValue:
            batch = self._current(name)
            # a graph that never expands has no other product of this site
            self.used.add(site.form)
            return add(number, x, y, batch.head_rows, batch.heads[0])

        module.change_expansion(ExpansionChange(expand_rows, absorb_heads))

    def _rows_of_parts(
        self,
        slots: TensorValue,
        parts: TensorValue,
        scales: TensorValue,
        count: Dim,
        experts: ExpertPlaces,
    ) -> AdapterRows:
        """The rows of experts or heads, sorted by slot and part.

        Args:
            slots: The slot of each row; -1: none.
            parts: The expert or head of each row.
            scales: The scale of each row.
            count: The number of rows.
            experts: The shares of the memory.
        """
        share = slots * experts.shares + (ops.cast(parts, DType.int32) + experts.first)
        none = ops.constant(-1, DType.int32, slots.device)
        # each row is a group of its own: [0, 1, …, rows]
        each = ops.range(
            0, TensorValue(count) + 1, 1, out_dim=count + 1, dtype=DType.int64, device=slots.device
        )  # fmt: skip
        return adapter_rows(
            ops.where(ops.greater_equal(slots, 0), share, none),
            scales,
            ops.cast(each, DType.uint32),
            count,
            self.shape.slots * experts.shares,
        )

    def _change_of_parts(
        self, name: str, kind: str, products: Sequence[str], experts: ExpertPlaces
    ) -> Callable[[int, TensorValue, TensorValue, AdapterRows, TensorValue], TensorValue]:
        """The change of the products of a layer's experts or heads; it takes the rows and the place of the block."""
        # those of the first part: the others lie a share further each
        sites = [self.layout.sites[f"{name}.{kind}.{product}.0"] for product in products]
        start, index = (
            own + experts.first * size
            for own, size in zip(
                experts.places[kind, int(name.split(".")[1])],
                (experts.elements, experts.sites),
                strict=True,
            )
        )
        slots = self.shape.slots * experts.shares

        def change(
            number: int, x: TensorValue, y: TensorValue, rows: AdapterRows, place: TensorValue
        ) -> TensorValue:
            batch, site = self._current(name), sites[number]
            self.used.add(site.form)
            return add_adapters(
                y,
                x,
                ops.reshape(batch.memory, [slots, experts.elements]),
                ops.reshape(batch.forms, [slots, experts.sites, 2]),
                rows,
                place,
                max_rank=site.max_rank,
                inputs=site.inputs,
                site=site.index - index,
                offset=site.offset - start,
            )

        return change

    def begin(self, inputs: Sequence[TensorValue], offsets: TensorValue, rows: Dim) -> None:
        """Sets the adapters of a batch, for the layers outside of blocks.

        Args:
            inputs: The graph's inputs, of `adapter_types`.
            offsets: The first row of each request.
            rows: The number of rows.
        """
        self._inputs = tuple(inputs)
        memory, forms, slots, scales = inputs
        sorted_rows = adapter_rows(slots, scales, offsets, rows, self.shape.slots)
        batch = _Batch(memory, forms, sorted_rows, self.place(-1))
        experts = self.layout.experts
        if experts is None:
            self._batch = batch
            return
        of_rows = ops.gather(slots, group_of_rows(rows, offsets), axis=0)
        nowhere = self._constant((0, 0))
        heads: tuple[TensorValue, ...] = ()
        if experts.has(HEADS):
            count = rows * experts.heads
            numbers = ops.range(
                0, TensorValue(count), 1, out_dim=count, dtype=DType.int64, device=slots.device
            )  # fmt: skip
            tokens = numbers // experts.heads
            own = self._rows_of_parts(
                ops.gather(of_rows, tokens, axis=0),
                numbers - tokens * experts.heads,
                ops.gather(sorted_rows.scales, tokens, axis=0),
                count,
                experts,
            )
            heads = nowhere, *own, slots, scales
        self._batch = replace(
            batch, experts=(nowhere, of_rows) if experts.has(EXPERTS) else (), heads=heads
        )

    @staticmethod
    def _constant(place: tuple[int, int]) -> TensorValue:
        """A first element and a first site, in the graph."""
        return ops.constant(np.array(place, np.int64), DType.int64, DeviceRef.CPU())

    def place(self, block: int) -> TensorValue:
        """The first element and the first site of a block, in the graph.

        Args:
            block: The index of the block; -1: that of the sites outside of blocks.
        """
        return self._constant(self.layout.places[block])

    def of_block(self, block: int) -> list[TensorValue]:
        """The inputs of a block, for `AdaptedBlock`."""
        assert self._batch is not None
        batch = replace(self._batch, place=self.place(block))
        for kind in (EXPERTS, HEADS):
            # blocks without parts of a kind take the same inputs
            if parts := getattr(batch, kind):
                assert self.layout.experts is not None
                place = self.layout.experts.places.get((kind, block), (0, 0))
                batch = replace(batch, **{kind: (self._constant(place), *parts[1:])})
        return batch.values

    @contextmanager
    def batch(self, values: Sequence[TensorValue]) -> Iterator[None]:
        """Sets the adapters of a batch within a ``with`` block.

        Args:
            values: As `of_block` returns them.
        """
        experts = self.layout.experts
        has_experts = experts is not None and experts.has(EXPERTS)
        before, self._batch = self._batch, _Batch.of(values, has_experts)
        try:
            yield
        finally:
            self._batch = before

    @contextmanager
    def equal_rows(self, rows: Dim) -> Iterator[None]:
        """Sets other rows within a ``with`` block: all tokens, or equally many rows of each request.

        Args:
            rows: The number of rows, such as that of logits.
        """
        before = self._batch
        assert before is not None
        # only where the rows are others, as sorting them takes a kernel
        if before.rows.order.shape[0] != rows:
            batch = self._inputs[2].shape[0]
            sequences = ops.range(
                0, TensorValue(batch) + 1, 1, out_dim=batch + 1, dtype=DType.int64, device=DeviceRef.CPU()
            ).to(self._inputs[2].device)  # fmt: skip
            each = sequences * TensorValue(rows // batch).to(sequences.device)
            self.begin(self._inputs, ops.cast(each, DType.uint32), rows)
        try:
            yield
        finally:
            self._batch = before

    def check_used(self) -> None:
        """Raises RuntimeError if a layer's weight is read without the layer being called."""
        missing = [site.name for site in self.layout.sites.values() if site.form not in self.used]
        if missing:
            raise RuntimeError(f"adapters: {missing[0]} is not called in the graph")


class AdaptedBlock(Module):
    """A block with the adapters of the batch as further arguments; its weights are those of the block.

    Args:
        block: The block.
        sites: The sites of the decoder.
    """

    def __init__(self, block: Module, sites: AdapterSites) -> None:
        self.block, self.sites = block, sites

    def _owned_weights(self) -> Any:
        return self.block._owned_weights()  # pyright: ignore[reportPrivateUsage]

    def __call__(self, *arguments: Any) -> Any:
        """The block's output.

        Args:
            arguments: Those of the block, then the values of `AdapterSites.of_block` in a list.
        """
        *own, values = arguments
        with self.sites.batch(values):
            return self.block(*own)
