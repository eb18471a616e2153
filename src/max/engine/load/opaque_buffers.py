"""Lowering of opaque values to buffers of the size and dtype in their type's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max import mlir
from max._lazy import lazy_module

if TYPE_CHECKING:
    import max.graph.ops.control.custom as custom_ops
else:
    custom_ops = lazy_module("max.graph.ops.control.custom")

__all__ = ["with_buffers"]


def with_buffers(module: mlir.ModuleOp) -> mlir.ModuleOp:
    """Replaces opaque values by buffers; returns the module itself if it has none.

    Raises:
        TypeError: A type has no size.
        NotImplementedError: An op creates an opaque value; only inputs may be opaque.
    """
    if not any(isinstance(value.type, mlir.OpaqueType) for value in _values(module)):
        return module
    changed = mlir.clone_module(module)
    for op in mlir.walk(changed):
        for result in op.results:
            if isinstance(result.type, mlir.OpaqueType):
                raise NotImplementedError(
                    f"{op.name}: a result is the opaque value {result.type.type_name!r}; make its memory "
                    "outside (a Tensor) and give it as an input, which the op changes in place"
                )
    for value in _values(changed):
        if isinstance(value.type, mlir.OpaqueType):
            value._type = custom_ops.opaque_buffer(value.type)  # pyright: ignore[reportPrivateUsage]
    return changed


def _values(module: mlir.ModuleOp) -> list[mlir.SSAValue]:
    """All values of a module: the results of its ops and the arguments of its blocks."""
    values: list[mlir.SSAValue] = []
    for op in module.walk():
        values.extend(op.results)
        for region in op.regions:
            for block in region.blocks:
                values.extend(block.args)
    return values
