"""Collectives: ops over tensors of several devices.

Operands are one tensor per device, one signal buffer per device, and a chain; results are one tensor per device, and a
chain.
"""

from __future__ import annotations

from max.dtype import DType
from max.mlir.operation import Attrs, OpSpec, Types, axis_of, define, tensor
from max.mlir.types import BufferType, ChainType, TensorType, short_types

_CHAIN = ChainType.get()


def _inputs(op: str, types: Types) -> list[TensorType]:
    """Checks the operands of a collective, and returns the types of its tensors."""
    # a tensor and a signal buffer for each device, and a chain
    if len(types) < 3 or len(types) % 2 == 0:
        raise ValueError(
            f"{op}: got {short_types(types)}, expected a tensor and a signal buffer for each device"
        )
    if types[-1] != _CHAIN:
        raise TypeError(f"{op}: the last operand is {short_types(types[-1:])}, expected a chain")
    count = len(types) // 2  # a tensor and a buffer each, then the chain
    tensors = [tensor(op, types, index) for index in range(count)]
    devices = [t.device for t in tensors]
    for index, device in enumerate(devices):
        if device in devices[:index]:
            raise ValueError(
                f"{op}: inputs {devices.index(device)} and {index} are both on {device.text}; "
                "expected one input per device"
            )
    for index, (x, buffer) in enumerate(zip(tensors, types[count:-1], strict=True)):
        if not isinstance(buffer, BufferType):
            raise TypeError(
                f"{op}: signal buffer {index} is {short_types([buffer])}, expected a buffer"
            )
        if buffer.device != x.device:
            raise ValueError(
                f"{op}: signal buffer {index} is on {buffer.device.text}, input {index} on "
                f"{x.device.text}; expected them on one device, in the same order"
            )
    first = tensors[0]
    for index, t in enumerate(tensors):
        if t.dtype is not first.dtype:
            raise TypeError(
                f"{op}: input {index} is {t.short}, input 0 is {first.short}; expected one dtype "
                "(cast)"
            )
        if t.rank != first.rank:
            raise ValueError(
                f"{op}: input {index} is {t.short}, input 0 is {first.short}; expected one rank"
            )
    return tensors


def _infer_allreduce(types: Types, attrs: Attrs) -> Types:
    """The types of the inputs, which have one shape, then a chain."""
    op = "allreduce"
    tensors = _inputs(op, types)
    first = tensors[0]
    if first.dtype is DType.bool:
        raise TypeError(f"{op}: input 0 is {first.short}; expected numbers")
    for index, t in enumerate(tensors):
        if t.shape != first.shape:
            raise ValueError(
                f"{op}: input {index} is {t.short}, input 0 is {first.short}; expected one shape"
            )
    return (*tensors, _CHAIN)


AllreduceOp = define(
    OpSpec(
        "mo.allreduce",
        (3, None),
        None,
        infer=_infer_allreduce,
        pure=False,
        takes="xs…, signal buffers…, chain",
        doc=(
            "the sum, on the device of each x; floats below 32 bits are added in f32; "
            "results, then a chain"
        ),
    )
)


def _infer_allgather(types: Types, attrs: Attrs) -> Types:
    """For each input the concatenation of all along the axis, on the input's device, then a chain."""
    op = "allgather"
    tensors = _inputs(op, types)
    first = tensors[0]
    axis = axis_of(op, attrs["axis"], first.rank)
    total = first.shape[axis]
    for index, t in enumerate(tensors[1:], 1):
        for i in range(first.rank):
            if i != axis and t.shape[i] != first.shape[i]:
                raise ValueError(
                    f"{op}: axis {i} of input {index} ({t.short}) is {t.shape[i]}, of input 0 "
                    f"({first.short}) {first.shape[i]}; only axis {axis} may differ"
                )
        total = total + t.shape[axis]
    shape = [*first.shape[:axis], total, *first.shape[axis + 1 :]]
    return (*(t.with_shape(shape) for t in tensors), _CHAIN)


AllgatherOp = define(
    OpSpec(
        "mo.allgather",
        (3, None),
        None,
        attributes={"axis": int},
        infer=_infer_allgather,
        pure=False,
        takes="xs…, signal buffers…, chain",
        doc="the concatenation, on the device of each x; results, then a chain",
    )
)
