"""Ops of low-rank adapters (LoRA): the rows of a batch sorted by adapter, and the terms that adapters add to products.

The adapters of a server are in the slots of one tensor. A *site* is a product that adapters may change. In each slot a
site has a place of `lora_place_size` elements at the same offset::

    A      [rank][inputs], for token inputs [inputs][rank]      bound: max_rank * inputs
    B      [panel of 16 columns][rank][16]                      bound: max_rank * columns
    gain   [columns]
    shift  [columns]

A and B are stored for the rank that the adapter has at the site, from the beginning of their parts on; with a
`max_rank` of 0 a site has gain and shift only. Columns are padded to strips of 32: kernels compute that many at once,
and read what lies there.
"""

from __future__ import annotations

from dataclasses import replace

from max.dtype import DType
from max.mlir.declare import NamedTypes, declare
from max.mlir.operand import FLOATS, Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.types import TensorType, short_types

__all__ = ["LoraAddOp", "LORA_PANEL", "lora_place_size", "lora_place_starts"]

LORA_PANEL = 16
"""The number of columns of a panel of B."""
_STRIP = 32
"""Columns are padded to a multiple of this."""

_INTS = (DType.int32,)
_ROWS = tuple(
    [dtype for dtype in FLOATS if dtype in (DType.float32, DType.bfloat16, DType.float16)]
)


def lora_place_starts(max_rank: int, inputs: int, columns: int) -> tuple[int, int, int, int]:
    """The offsets of B, gain, shift and the end in the place of a site.

    Args:
        max_rank: The bound of the adapters' rank at the site.
        inputs: The number of inputs of the product.
        columns: The number of its outputs.
    """
    padded = -(-columns // _STRIP) * _STRIP
    b = -(-max_rank * inputs // _STRIP) * _STRIP
    gain = b + max_rank * padded
    return b, gain, gain + padded, gain + 2 * padded


def lora_place_size(max_rank: int, inputs: int, columns: int) -> int:
    """The number of elements of the place of a site; see `lora_place_starts`."""
    return lora_place_starts(max_rank, inputs, columns)[-1]


def _check_rows(types: NamedTypes, results: Types, attrs: Attrs) -> None:
    """Checks the results: the order of the rows, the slot of each sorted row, the scale of each row, and the count."""
    op, slots = "lora.rows.ragged", types["slots"]
    rows = results[0]
    if not isinstance(rows, TensorType) or rows.rank != 1:
        raise ValueError(f"{op}: the first result is {rows}, expected [rows]")
    expected = (
        TensorType.get(DType.int32, rows.shape, slots.device),
        TensorType.get(DType.int32, rows.shape, slots.device),
        TensorType.get(DType.float32, rows.shape, slots.device),
        TensorType.get(DType.int32, slots.with_shape((1,)).shape, slots.device),
    )
    if tuple(results) != expected:
        raise ValueError(
            f"{op}: the results are {short_types(results)}, expected {short_types(expected)}"
        )


define(
    declare(
        "mo.lora.rows.ragged",
        (
            Operand("slots", _INTS, 1),
            Operand("scales", (DType.float32,), 1),
            Operand("input_row_offsets", (DType.uint32,), 1),
        ),
        4,
        result_rule=_check_rows,
        attributes={"max_slots": int},
        takes="slots si32 `[batch]` (-1: none), scales f32 `[batch]`, input_row_offsets u32 `[batch+1]`",
        gives="order si32 `[rows]`, slots si32 `[rows]`, scales f32 `[rows]`, count si32 `[1]`",
        doc="rows sorted by the slot of their adapter, those without one last; scales are in the order of rows",
    )
)


def _changed_type(types: NamedTypes, attrs: Attrs) -> Types:
    op, y, x = "lora.add", types["y"], types["x"]
    if attrs["inputs"] < 1:
        raise ValueError(f"{op}: inputs is {attrs['inputs']}, expected 1 or more")
    for name in ("max_rank", "site", "offset"):
        if attrs[name] < 0:
            raise ValueError(f"{op}: {name} is {attrs[name]}, expected 0 or more")
    is_token = x.dtype is DType.int64
    size = 1 if is_token else attrs["inputs"]
    if x.shape[1:] != x.with_shape((size,)).shape:
        raise ValueError(f"{op}: x is {x.short}, expected {size} as the last dimension")
    for name, size in (("count", (1,)), ("place", (2,))):
        if types[name].shape != types[name].with_shape(size).shape:
            raise ValueError(f"{op}: {name} is {types[name].short}, expected {list(size)}")
    if types["forms"].shape[2:] != types["forms"].with_shape((2,)).shape:
        raise ValueError(f"{op}: forms is {types['forms'].short}, expected [slots, sites, 2]")
    if x.shape[0] != y.shape[0] or types["order"].shape[0] != y.shape[0]:
        raise ValueError(
            f"{op}: y is {y.short}, x {x.short}, order {types['order'].short}; the first dimensions must be equal"
        )
    return (TensorType.get(y.dtype, y.shape, y.device),)


# products of one x are merged across it: their terms are added after all of them
LoraAddOp = define(
    replace(
        declare(
            "mo.lora.add",
            (
                Operand("y", _ROWS, 2),
                # [rows, inputs], or [rows, 1] indices of inputs, which stand for one-hot rows
                Operand("x", (*_ROWS, DType.int64), 2),
                Operand("memory", _ROWS, 2),
                Operand("forms", _INTS, 3),
                Operand("order", _INTS, 1),
                Operand("slots", _INTS, 1),
                Operand("scales", (DType.float32,), 1),
                Operand("count", _INTS, 1),
                Operand("place", (DType.int64,), 1, on_any_device=True),
            ),
            1,
            _changed_type,
            attributes={"max_rank": int, "inputs": int, "site": int, "offset": int},
            takes=(
                "y `[rows, columns]`, x `[rows, inputs]` or indices si64 `[rows, 1]`, memory `[slots, elements]`, "
                "forms si32 `[slots, sites, 2]` (rank, whether there are gain and shift), order, slots, scales, count, "
                "place si64 `[2]` (first element, first site)"
            ),
            gives="y's type",
            doc=(
                "`y + scale (B A x + gain y + shift)` of each row, with the adapter in its slot; "
                "`max.mlir.ops.models.adapters` has the layout"
            ),
        ),
        separates=False,
    )
)
