"""The device of an op."""

from __future__ import annotations

from xdsl.ir import Attribute

from max._backends.backend import HOST, Backend, Backends
from max.mlir import BufferType, MoOp, ShapedType

__all__ = ["backend_of", "device_of", "index_of"]


def index_of(type_: Attribute, backends: Backends) -> int:
    """The index of the backend whose memory holds values of a type.

    Raises:
        ValueError: The session does not have the device.
    """
    # chains have no memory, so no device of their own
    return backends.index(type_.device.data) if isinstance(type_, ShapedType) else HOST


def device_of(op: MoOp, backends: Backends) -> int:
    """The index of the backend that runs an op: that of its results, else of the buffer that it writes, else of its
    operands.

    Raises:
        ValueError: The session does not have the device.
    """
    results = [r.type for r in op.results if isinstance(r.type, ShapedType)]
    buffers = [v.type for v in op.operands if isinstance(v.type, BufferType)]
    operands = [v.type for v in op.operands if isinstance(v.type, ShapedType)]
    for types in (results, buffers, operands):
        if types:
            return index_of(types[0], backends)
    return HOST


def backend_of(op: MoOp, backends: Backends) -> Backend:
    """The backend that an op runs on; see `device_of`."""
    return backends[device_of(op, backends)]
