"""The products of a decoder that adapters may change, and their places in the memory of an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from max._dataclass import dataclass
from max._lazy import lazy_module
from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, Type, ops
from max.nn.kernels.adapters import AdapterRows, adapter_rows, add_adapters
from max.nn.layer import Module
from max.nn.layers.embedding import Embedding
from max.nn.layers.gptq_linear import GPTQLinear
from max.nn.layers.linear import Linear
from max.nn.layers.norm import LayerNorm, RMSNorm
from max.pipelines.models.blocks.norms import PlainLayerNorm

# loaded when a decoder with adapters is staged
if TYPE_CHECKING:
    from max.mlir.ops.models import adapters as adapter_ops
else:
    adapter_ops = lazy_module("max.mlir.ops.models.adapters")

__all__ = ["AdapterLayout", "AdapterShape", "AdapterSites", "AdaptedBlock", "Site", "adapter_types"]

TABLES = ("embed_tokens",)
"""The tables that adapters may change."""
WHOLE = (*TABLES, "lm_head")
"""The layers whose whole weights adapters may replace, beside norms."""
NORMS = (RMSNorm, LayerNorm, PlainLayerNorm)
ABSORBED = ("kv_b_proj", "gate_score")
"""Projections whose weights the layers multiply with other weights: an adapter would have no place to be added."""


@dataclass(frozen=True)
class AdapterShape:
    """The memory for adapters.

    Args:
        slots: The number of adapters that steps can use at once.
        max_rank: The bound of their rank.
        dtype: The dtype of their matrices.
        whole: Whether they may replace the whole weights of embedding, output layer and norms.
    """

    slots: int
    max_rank: int
    dtype: DType
    whole: bool = False


@dataclass(frozen=True)
class Site:
    """A product that adapters may change.

    Args:
        name: The name of its layer, such as ``layers.3.mlp.up_proj``.
        inputs: The number of inputs; of a table of rows, the number of rows.
        columns: The number of outputs.
        is_table: Whether it looks up rows of a table.
        index: Its index among all sites.
        offset: The first element of its place in the memory of an adapter.
        max_rank: The bound of the rank.
        norm_offset: Of a norm what it adds to its weight; None: it is none.
        takes_whole: Whether a change of full rank fits.
    """

    name: str
    inputs: int
    columns: int
    is_table: bool
    index: int
    offset: int
    max_rank: int
    norm_offset: float | None = None
    takes_whole: bool = False


class AdapterLayout:
    """All sites of a decoder.

    Args:
        sites: The sites, by index.
        places: The first element and the first site of each block; the last place is that of the sites outside.
        elements: The number of elements of an adapter's memory.
    """

    def __init__(
        self, sites: Sequence[Site], places: Sequence[tuple[int, int]], elements: int
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.places, self.elements = tuple(places), elements

    @classmethod
    def of(cls, model: Module, shape: AdapterShape) -> AdapterLayout:
        """The sites of a decoder: the linear layers of its blocks and those outside of them, and the embedding.

        Args:
            model: The decoder.
            shape: The memory for adapters.
        """
        found: dict[str, list[tuple[str, Module]]] = {}
        tables = {
            name: sizes_of(module)[1]
            for name, module in ((p.removesuffix("."), m) for p, m in model.named_modules())
            if name in TABLES and isinstance(module, Embedding)
        }
        hidden = next(iter(tables.values()), 0)
        for prefix, module in model.named_modules():
            name = prefix.removesuffix(".")
            if shape.whole and isinstance(module, NORMS) and _norm_size(module) == hidden:
                parts = name.split(".")
                found.setdefault(parts[1] if parts[0] == "layers" else "", []).append(
                    (name, module)
                )
                continue
            if not isinstance(module, Linear | Embedding):
                continue
            parts = name.split(".")
            if parts[-1] in ABSORBED:
                continue
            if parts[0] == "layers" and isinstance(module, Linear):
                found.setdefault(parts[1], []).append((name, module))
            elif parts[0] != "layers" and (isinstance(module, Linear) or name in TABLES):
                found.setdefault("", []).append((name, module))
        sites: list[Site] = []
        places: list[tuple[int, int]] = []
        offset = 0
        blocks = sorted((key for key in found if key), key=int)
        count = 1 + max(map(int, blocks), default=-1)
        for key in [*map(str, range(count)), ""]:
            places.append((offset, len(sites)))
            for name, module in found.get(key, []):
                site = _site(name, module, len(sites), offset, shape)
                sites.append(site)
                offset += adapter_ops.lora_place_size(site.max_rank, site.inputs, site.columns)
        return cls(sites, places, offset)


def _site(name: str, module: Module, index: int, offset: int, shape: AdapterShape) -> Site:
    if isinstance(module, NORMS):
        size = _norm_size(module)
        added = float(getattr(module, "weight_offset", getattr(module, "offset", 0.0)))
        # its terms are a gain and a shift, without matrices
        return Site(name, size, size, False, index, offset, 1, added)
    inputs, columns = sizes_of(module)
    is_table, rank = isinstance(module, Embedding), shape.max_rank
    whole = shape.whole and name in WHOLE
    if whole:
        rank = max(rank, columns if is_table else inputs)
    return Site(name, inputs, columns, is_table, index, offset, rank, takes_whole=whole)


def _norm_size(module: RMSNorm | LayerNorm | PlainLayerNorm) -> int:
    """The size of a norm's rows; 0 where it has no weight."""
    return 0 if module.weight is None else int(module.weight.shape[0])


def sizes_of(module: Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear layer, or of rows and columns of a table."""
    if isinstance(module, GPTQLinear):
        packed = 32 // module.quantization_config.bits
        return int(module.qweight.shape[0]) * packed, int(module.qweight.shape[1])
    assert isinstance(module, Linear | Embedding)
    weight = module.weight
    rows, columns = (int(dim) for dim in weight.shape)
    encoding = weight.quantization_encoding
    if encoding is not None:
        columns = columns // encoding.block_size * encoding.elements_per_block
    return (rows, columns) if isinstance(module, Embedding) else (columns, rows)


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
        TensorType(DType.int32, [shape.slots, len(layout.sites), 2], device),
        TensorType(DType.int32, [batch], device),
        TensorType(DType.float32, [batch], device),
    ]


@dataclass(frozen=True)
class _Batch:
    """The values of adapters in the graph that is staged."""

    memory: TensorValue
    forms: TensorValue
    rows: AdapterRows
    place: TensorValue

    @property
    def values(self) -> list[TensorValue]:
        return [self.memory, self.forms, *self.rows, self.place]


class AdapterSites:
    """Adds the terms of adapters to the products of a decoder while its graph is staged.

    Args:
        model: The decoder; the outputs of its layers are changed.
        shape: The memory for adapters.
    """

    def __init__(self, model: Module, shape: AdapterShape) -> None:
        self.layout, self.shape = AdapterLayout.of(model, shape), shape
        self.used: set[str] = set()
        """The names of the sites that were staged, of one block for all blocks of the same form."""
        self._batch: _Batch | None = None
        self._inputs: tuple[TensorValue, ...] = ()
        modules = {prefix.removesuffix("."): module for prefix, module in model.named_modules()}
        for site in self.layout.sites.values():
            self._attach(site, modules[site.name])

    def _attach(self, site: Site, module: Module) -> None:
        first = site.name.split(".")
        block = int(first[1]) if first[0] == "layers" else -1
        offset, index = self.layout.places[block]

        def change(x: TensorValue, y: TensorValue) -> TensorValue:
            batch = self._batch
            if batch is None:
                raise RuntimeError(f"{site.name}: the adapters of the batch are not set")
            self.used.add(site.name)
            if site.norm_offset is not None:
                x = y
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
        self._batch = _Batch(memory, forms, sorted_rows, self.place(-1))

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
        return [*self._batch.values[:-1], self.place(block)]

    @contextmanager
    def batch(self, values: Sequence[TensorValue]) -> Iterator[None]:
        """Sets the adapters of a batch within a ``with`` block.

        Args:
            values: As `of_block` returns them.
        """
        memory, forms, *rows, place = values
        before, self._batch = self._batch, _Batch(memory, forms, AdapterRows(*rows), place)
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
        forms = {_without_index(name) for name in self.used}
        missing = [name for name in self.layout.sites if _without_index(name) not in forms]
        if missing:
            raise RuntimeError(f"adapters: {missing[0]} is not called in the graph")


def _without_index(name: str) -> str:
    """The name of a site without the index of its block."""
    parts = name.split(".")
    return ".".join([*parts[:1], *parts[2:]]) if parts[0] == "layers" else name


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
