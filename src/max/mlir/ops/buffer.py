"""Ops on buffers, which are mutable tensors; chains order the accesses. Also chains and printing."""

from __future__ import annotations

from max.mlir.conditions import Condition
from max.mlir.operation import Attrs, OpSpec, Types, define, tensor
from max.mlir.ops.shape import (
    SLICE_ATTRIBUTES,
    check_slice_bounds,
    check_slice_result,
    slice_conditions,
    slice_shape,
)
from max.mlir.types import BufferType, ChainType, short_types

_CHAIN = ChainType.get()


def _buffer(op: str, types: Types, index: int) -> BufferType:
    type_ = types[index]
    if not isinstance(type_, BufferType):
        raise TypeError(f"{op}: operand {index} is {short_types([type_])}, expected a buffer")
    return type_


def _chain(op: str, types: Types, index: int) -> None:
    if types[index] != _CHAIN:
        raise TypeError(f"{op}: operand {index} is {short_types([types[index]])}, expected a chain")


def _check_create(operands: Types, results: Types, attrs: Attrs) -> None:
    _buffer("buffer_create", results, 0)


BufferCreateOp = define(
    OpSpec(
        "mo.buffer_create",
        (0, 0),
        1,
        check=_check_create,
        pure=False,
        removable=True,
        doc="uninitialized",
    )
)


def _infer_load(types: Types, attrs: Attrs) -> Types:
    buffer = _buffer("buffer_load", types, 0)
    _chain("buffer_load", types, 1)
    return (buffer.as_tensor(), _CHAIN)


BufferLoadOp = define(
    OpSpec(
        "mo.buffer_load",
        (2, 2),
        2,
        infer=_infer_load,
        pure=False,
        borrows=True,
        takes="buffer, chain",
        doc="tensor, chain",
    )
)


def _infer_store(types: Types, attrs: Attrs) -> Types:
    """A chain; the source must have the type of the buffer's contents."""
    source = tensor("buffer_store", types, 0)
    buffer = _buffer("buffer_store", types, 1)
    _chain("buffer_store", types, 2)
    if source != buffer.as_tensor():
        raise ValueError(
            f"buffer_store: the source is {source.short}, the buffer holds {buffer.as_tensor().short}"
        )
    return (_CHAIN,)


BufferStoreOp = define(
    OpSpec(
        "mo.buffer_store",
        (3, 3),
        1,
        infer=_infer_store,
        pure=False,
        reads_strided=True,
        takes="tensor, buffer, chain",
        doc="chain",
    )
)


def _infer_store_slice(types: Types, attrs: Attrs) -> Types:
    """A chain; the source must have the shape of the slice."""
    op = "buffer_store_slice"
    source = tensor(op, types, 0)
    buffer = _buffer(op, types, 1)
    _chain(op, types, 2)
    if source.dtype is not buffer.dtype or source.device != buffer.device:
        raise TypeError(
            f"{op}: the source is {source.short}, the buffer holds {buffer.as_tensor().short}"
        )
    expected = slice_shape(op, buffer.shape, attrs["start"], attrs["stop"], attrs["step"])
    check_slice_result(op, expected, source.shape)
    return (_CHAIN,)


def _store_slice_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    op = "buffer_store_slice"
    source, buffer = tensor(op, operands, 0), _buffer(op, operands, 1)
    return slice_conditions(op, buffer.shape, source.shape, attrs)


BufferStoreSliceOp = define(
    OpSpec(
        "mo.buffer_store_slice",
        (3, 3),
        1,
        attributes=SLICE_ATTRIBUTES,
        infer=_infer_store_slice,
        conditions=_store_slice_conditions,
        pure=False,
        takes="tensor, buffer, chain",
        doc="as `mo.slice`; chain",
    )
)


def _infer_store_slice_dynamic(types: Types, attrs: Attrs) -> Types:
    """A chain; the shape of the slice is compared with the source's at run time."""
    op = "buffer_store_slice"
    source = tensor(op, types, 0)
    buffer = _buffer(op, types, 1)
    _chain(op, types, 5)
    if source.dtype is not buffer.dtype or source.device != buffer.device:
        raise TypeError(
            f"{op}: the source is {source.short}, the buffer holds {buffer.as_tensor().short}"
        )
    if source.rank != buffer.rank:
        raise ValueError(f"{op}: the source {source.short} and {buffer.short} differ in rank")
    check_slice_bounds(op, types[2:5], buffer.rank, buffer.device)
    return (_CHAIN,)


define(
    OpSpec(
        "mo.buffer_store_slice_dynamic",
        (6, 6),
        1,
        infer=_infer_store_slice_dynamic,
        pure=False,
        takes="tensor, buffer, start, stop, step (1-d si64, on the CPU), chain",
        doc="chain",
    )
)


def _infer_chain_create(types: Types, attrs: Attrs) -> Types:
    return (_CHAIN,)


ChainCreateOp = define(
    OpSpec(
        "mo.chain_create",
        (0, 0),
        1,
        infer=_infer_chain_create,
        removable=True,
        doc="a chain without earlier effects; the first chain of the entry graph",
    )
)


def _infer_print(types: Types, attrs: Attrs) -> Types:
    """A chain; there is either a tensor or the attribute `text`."""
    _chain("print", types, len(types) - 1)
    text = attrs.get("text")
    if len(types) == 2:
        tensor("print", types, 0)
    if (len(types) == 2) == (text is not None):
        raise ValueError("print: expected either a tensor or the attribute 'text'")
    return (_CHAIN,)


PrintOp = define(
    OpSpec(
        "mo.print",
        (1, 2),
        1,
        attributes={"label": str},
        optional={"text": str},
        infer=_infer_print,
        pure=False,
        on_any_device=True,
        takes="[tensor], chain",
        doc="`label`, `text` where there is no tensor; chain",
    )
)
