"""The products of a decoder that adapters may change, in the graph that is staged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, Type, ops
from max.nn.kernels.adapters import AdapterRows, adapter_rows, add_adapters
from max.nn.kernels.ragged import group_of_rows
from max.nn.layer import Module
from max.nn.layers.experts import RowChange
from max.nn.layers.linear import Linear
from max.pipelines.adapters.layout import AdapterLayout, AdapterShape, ExpertPlaces, Site
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
        expert_place: Its place in a share of an expert; empty: there are no experts.
        slots: The slot of each row; empty: there are no experts.
    """

    memory: TensorValue
    forms: TensorValue
    rows: AdapterRows
    place: TensorValue
    expert_place: tuple[TensorValue, ...] = ()
    slots: tuple[TensorValue, ...] = ()

    @classmethod
    def of(cls, values: Sequence[TensorValue]) -> _Batch:
        """The batch with these `values`."""
        memory, forms, *rows = values[:6]
        return cls(
            memory, forms, AdapterRows(*rows), values[6], tuple(values[7:8]), tuple(values[8:])
        )

    @property
    def values(self) -> list[TensorValue]:
        return [self.memory, self.forms, *self.rows, self.place, *self.expert_place, *self.slots]


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
            if isinstance(module, DecoderExperts) and self.layout.experts is not None:
                self._attach_experts(name, module, self.layout.experts)

    def _attach(self, site: Site, module: Module) -> None:
        first = site.name.split(".")
        block = int(first[1]) if first[0] == "layers" else -1
        offset, index = self.layout.places[block]

        def change(x: TensorValue, y: TensorValue) -> TensorValue:
            batch = self._batch
            if batch is None:
                raise RuntimeError(f"{site.name}: the adapters of the batch are not set")
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
                batch.rows,
                batch.place,
                max_rank=site.max_rank,
                inputs=site.inputs,
                site=site.index - index,
                offset=site.offset - offset,
            )

        if isinstance(module, Linear):
            module.change_products(change)
        else:
            module.change_outputs(change)

    def _attach_experts(self, name: str, module: DecoderExperts, experts: ExpertPlaces) -> None:
        """Makes the products of a block's experts take adapters: an expert of a slot is a slot of its own."""
        # those of the first expert: the others lie a share further each
        sites = [self.layout.sites[f"{name}.experts.{p}.0"] for p in module.projections]
        block = int(name.split(".")[1])
        start, index = (
            own + experts.first * size
            for own, size in zip(
                experts.places[block], (experts.elements, experts.sites), strict=True
            )
        )
        slots = self.shape.slots * experts.shares

        def change_of(tokens: TensorValue, chosen: TensorValue) -> RowChange:
            batch = self._batch
            if batch is None:
                raise RuntimeError(f"{name}: the adapters of the batch are not set")
            own = ops.gather(batch.slots[0], tokens, axis=0)  # [rows]
            share = own * experts.shares + (ops.cast(chosen, DType.int32) + experts.first)
            none = ops.constant(-1, DType.int32, own.device)
            count = tokens.shape[0]
            # each row is a group of its own: [0, 1, …, rows]
            each = ops.range(
                0, TensorValue(count) + 1, 1, out_dim=count + 1, dtype=DType.int64, device=own.device
            )  # fmt: skip
            rows = adapter_rows(
                ops.where(ops.greater_equal(own, 0), share, none),
                ops.gather(batch.rows.scales, tokens, axis=0),
                ops.cast(each, DType.uint32),
                count,
                slots,
            )
            memory = ops.reshape(batch.memory, [slots, experts.elements])
            forms = ops.reshape(batch.forms, [slots, experts.sites, 2])

            def change(number: int, x: TensorValue, y: TensorValue) -> TensorValue:
                site = sites[number]
                self.used.add(site.form)
                return add_adapters(
                    y,
                    x,
                    memory,
                    forms,
                    rows,
                    batch.expert_place[0],
                    max_rank=site.max_rank,
                    inputs=site.inputs,
                    site=site.index - index,
                    offset=site.offset - start,
                )

            return change

        module.change_products(change_of)

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
        of_rows = ()
        if self.layout.experts is not None:
            of_rows = (ops.gather(slots, group_of_rows(rows, offsets), axis=0),)
        self._batch = _Batch(memory, forms, sorted_rows, self.place(-1), (), of_rows)

    def place(self, block: int) -> TensorValue:
        """The first element and the first site of a block, in the graph.

        Args:
            block: The index of the block; -1: that of the sites outside of blocks.
        """
        return ops.constant(
            np.array(self.layout.places[block], np.int64), DType.int64, DeviceRef.CPU()
        )

    def of_block(self, block: int) -> list[TensorValue]:
        """The inputs of a block, for `AdaptedBlock`."""
        assert self._batch is not None
        experts = self.layout.experts
        own = ()
        if experts is not None:
            # blocks without experts of their own take the same inputs
            place = np.array(experts.places.get(block, (0, 0)), np.int64)
            own = (ops.constant(place, DType.int64, DeviceRef.CPU()),)
        return replace(self._batch, place=self.place(block), expert_place=own).values

    @contextmanager
    def batch(self, values: Sequence[TensorValue]) -> Iterator[None]:
        """Sets the adapters of a batch within a ``with`` block.

        Args:
            values: As `of_block` returns them.
        """
        before, self._batch = self._batch, _Batch.of(values)
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
