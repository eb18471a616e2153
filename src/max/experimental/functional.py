"""The ops of `max.graph.ops` as functions on eager tensors, and on graph values while a graph is being built.

Each takes tensors, numbers and arrays as the op does and returns `Tensor`; see the op for what it computes. One operand
at least must be a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from max._names import keyword_aliases, lazy_names
from max.driver import Device
from max.dtype import DType
from max.experimental.random import (
    gaussian,
    gaussian_like,
    normal,
    normal_like,
    uniform,
    uniform_like,
)
from max.experimental.record.dispatch import apply, in_graph
from max.experimental.tensor import Tensor, defaults
from max.experimental.tensors import mutation, operations
from max.experimental.tensors.control import cond, side_stream, while_loop
from max.experimental.tensors.custom_ops import custom, inplace_custom
from max.experimental.tensors.function_wrappers import functional
from max.experimental.tensors.further_functions import (
    arange,
    clamp,
    clip,
    complex_mul,
    elementwise_max,
    elementwise_min,
    ensure_context,
    full,
    full_like,
    in_graph_context,
    lazy,
    ones,
    ones_like,
    print,
    shape_to_tensor,
    zeros,
    zeros_like,
)  # fmt: skip
from max.experimental.tensors.placement import device_of
from max.graph import (
    DeviceRef,
    DimLike,
    TensorType,
    TensorValueLike,
    ops,
)

__all__ = [
    "abs", "acos", "add", "allgather", "allreduce_sum", "arange", "argmax", "argmin", "argsort",
    "as_interleaved_complex", "atanh", "avg_pool2d", "band_part", "bottom_k", "broadcast_to", "buffer_store",
    "buffer_store_slice", "cast", "ceil", "chunk", "clamp", "clip", "complex_mul", "concat", "cond",
    "constant", "constant_external", "conv2d", "conv2d_transpose", "conv3d", "cos", "cumsum", "custom", "dequantize",
    "div", "elementwise_max", "elementwise_min", "ensure_context", "equal", "erf", "exp",
    "flatten", "floor", "floor_div", "fold", "full", "full_like", "functional", "gather", "gather_nd", "gaussian",
    "gaussian_like", "gelu", "greater", "greater_equal", "group_norm", "hann_window", "in_graph_context",
    "inplace_custom", "irfft", "is_inf", "is_nan", "layer_norm", "lazy", "log", "log1p", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logsoftmax", "masked_scatter", "matmul", "max", "max_pool2d", "mean", "min", "mod",
    "mul", "negate", "non_maximum_suppression", "nonzero", "normal", "normal_like", "not_equal", "ones", "ones_like",
    "outer", "pad", "permute", "pow", "print", "prod", "qmatmul", "range", "rebind", "relu", "repeat_interleave",
    "reshape", "resize", "resize_bicubic", "resize_linear", "resize_nearest", "rms_norm", "roi_align", "round", "rsqrt",
    "scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul", "scatter_nd", "scatter_nd_add",
    "scatter_nd_max", "scatter_nd_min", "scatter_nd_mul", "shape_to_tensor", "side_stream", "sigmoid", "silu", "sin",
    "slice_tensor", "softmax", "split", "sqrt", "squeeze", "stack", "sub", "sum", "tanh", "tile", "top_k",
    "transfer_to", "transpose", "trunc", "uniform", "uniform_like", "unsqueeze", "where", "while_loop", "zeros",
    "zeros_like",
]  # fmt: skip


def _on_operands(op: Callable[..., Any]) -> Callable[..., Tensor]:
    """`functional` for ops whose operands could all be numbers, which have no dtype of their own."""
    name = op.__name__

    @functools.wraps(op)
    def on_tensors(lhs: Any, rhs: Any) -> Any:
        if not in_graph() and not isinstance(lhs, Tensor) and not isinstance(rhs, Tensor):
            raise TypeError(
                f"{name}: neither {lhs!r} nor {rhs!r} is a Tensor; make one with Tensor.constant(value, dtype=...)"
            )
        return apply(op, (lhs, rhs), {})

    return on_tensors


def _reduction(op: Callable[..., Any]) -> Callable[..., Tensor]:
    """`functional` for reductions, whose axis may be None for all elements."""

    @functools.wraps(op)
    def on_tensors(x: Any, axis: int | None = -1) -> Any:
        return apply(op, operations.along(x, axis), {})

    return on_tensors


class _Default(int):
    """A default that differs from an equal argument."""


_LAST_AXIS = _Default(-1)


def _extremum(op: Callable[..., Any]) -> Callable[..., Tensor]:
    """`functional` for `max` and `min`: of two tensors, or along an axis, which may be None for all elements."""

    @functools.wraps(op)
    def on_tensors(x: Any, y: Any = None, /, axis: int | None = _LAST_AXIS) -> Any:
        if y is not None:
            return apply(op, (x, y), {} if axis is _LAST_AXIS else {"axis": axis})
        x, axis = operations.along(x, axis)
        return apply(op, (x,), {"axis": axis})

    return on_tensors


add = _on_operands(ops.add)
div = _on_operands(ops.div)
equal = _on_operands(ops.equal)
floor_div = _on_operands(ops.floor_div)
greater = _on_operands(ops.greater)
greater_equal = _on_operands(ops.greater_equal)
logical_and = _on_operands(ops.logical_and)
logical_or = _on_operands(ops.logical_or)
logical_xor = _on_operands(ops.logical_xor)
matmul = _on_operands(ops.matmul)
mod = _on_operands(ops.mod)
mul = _on_operands(ops.mul)
not_equal = _on_operands(ops.not_equal)
outer = _on_operands(ops.outer)
pow = _on_operands(ops.pow)
sub = _on_operands(ops.sub)

abs = functional(ops.abs)
acos = functional(ops.acos)
argmax = _reduction(ops.argmax)
argmin = _reduction(ops.argmin)
argsort = functional(ops.argsort)
as_interleaved_complex = functional(ops.as_interleaved_complex)
atanh = functional(ops.atanh)
avg_pool2d = functional(ops.avg_pool2d)
band_part = functional(ops.band_part)
bottom_k = functional(ops.bottom_k)
broadcast_to = functional(ops.broadcast_to)
cast = functional(ops.cast)
ceil = functional(ops.ceil)
chunk = functional(ops.chunk)
concat = functional(ops.concat)
conv2d = functional(ops.conv2d)
conv2d_transpose = functional(ops.conv2d_transpose)
conv3d = functional(ops.conv3d)
cos = functional(ops.cos)
cumsum = functional(ops.cumsum)
dequantize = functional(ops.dequantize)
erf = functional(ops.erf)
exp = functional(ops.exp)
flatten = functional(ops.flatten)
floor = functional(ops.floor)
fold = functional(ops.fold)
gather = functional(ops.gather)
gather_nd = functional(ops.gather_nd)
gelu = functional(ops.gelu)
group_norm = functional(ops.group_norm)
irfft = functional(ops.irfft)
is_inf = functional(ops.is_inf)
is_nan = functional(ops.is_nan)
layer_norm = functional(ops.layer_norm)
log = functional(ops.log)
log1p = functional(ops.log1p)
logical_not = functional(ops.logical_not)
logsoftmax = functional(ops.logsoftmax)
masked_scatter = functional(ops.masked_scatter)
max = _extremum(ops.max)
max_pool2d = functional(ops.max_pool2d)
mean = _reduction(ops.mean)
min = _extremum(ops.min)
negate = functional(ops.negate)
non_maximum_suppression = functional(ops.non_maximum_suppression)
nonzero = functional(ops.nonzero)
pad = functional(ops.pad)
permute = functional(ops.permute)
prod = _reduction(ops.prod)
qmatmul = functional(ops.qmatmul)
relu = functional(ops.relu)
repeat_interleave = functional(ops.repeat_interleave)
reshape = functional(ops.reshape)
resize = functional(ops.resize)
resize_bicubic = functional(ops.resize_bicubic)
resize_linear = functional(ops.resize_linear)
resize_nearest = functional(ops.resize_nearest)
rms_norm = functional(ops.rms_norm)
roi_align = functional(ops.roi_align)
round = functional(ops.round)
rsqrt = functional(ops.rsqrt)
scatter = functional(ops.scatter)
scatter_add = functional(ops.scatter_add)
scatter_max = functional(ops.scatter_max)
scatter_min = functional(ops.scatter_min)
scatter_mul = functional(ops.scatter_mul)
scatter_nd = functional(ops.scatter_nd)
scatter_nd_add = functional(ops.scatter_nd_add)
scatter_nd_max = functional(ops.scatter_nd_max)
scatter_nd_min = functional(ops.scatter_nd_min)
scatter_nd_mul = functional(ops.scatter_nd_mul)
sigmoid = functional(ops.sigmoid)
silu = functional(ops.silu)
sin = functional(ops.sin)
slice_tensor = functional(ops.slice_tensor)
softmax = functional(ops.softmax)
split = keyword_aliases(split_size_or_sections="split_sizes")(functional(operations.split))
sqrt = functional(ops.sqrt)
squeeze = functional(ops.squeeze)
sum = _reduction(ops.sum)
tanh = functional(ops.tanh)
tile = functional(ops.tile)
top_k = functional(ops.top_k)
transpose = functional(ops.transpose)
trunc = functional(ops.trunc)
unsqueeze = functional(ops.unsqueeze)
where = keyword_aliases(cond="condition")(functional(ops.where))
rebind = functional(ops.rebind)


@keyword_aliases(target="device")
@functools.wraps(ops.transfer_to)
def transfer_to(x: Any, device: Any) -> Tensor:
    return apply(ops.transfer_to, (x, device_of(device)), {})


def _collective(op: Callable[..., Any]) -> Callable[..., Any]:
    """`functional` for collectives of a tensor for each device; of one tensor it is that tensor, on its one device."""
    on_several = functional(op)

    @functools.wraps(op)
    def on_tensors(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("t")
        return tensor if isinstance(tensor, Tensor) else on_several(*args, **kwargs)

    return on_tensors


allgather = _collective(ops.allgather)
allreduce_sum = _collective(ops.allreduce.sum)


@functools.wraps(ops.range)
def range(
    start: TensorValueLike,
    stop: TensorValueLike,
    step: TensorValueLike = 1,
    out_dim: DimLike | None = None,
    *,
    dtype: DType | None = None,
    device: Device | DeviceRef | None = None,
) -> Tensor:
    kind, place = _defaults(dtype, device)
    return apply(ops.range, (start, stop, step, out_dim), {"dtype": kind, "device": place})


@functools.wraps(ops.hann_window)
def hann_window(
    window_length: int,
    device: Device | DeviceRef | None = None,
    periodic: bool = True,
    dtype: DType | None = None,
) -> Tensor:
    kind, place = _defaults(dtype, device)
    return apply(ops.hann_window, (window_length, place, periodic, kind), {})


def _defaults(dtype: DType | None, device: Device | DeviceRef | None) -> tuple[DType, DeviceRef]:
    kind, place = defaults(dtype, device.to_device() if isinstance(device, DeviceRef) else device)
    return kind, DeviceRef.from_device(place)


@functools.wraps(ops.stack)
def stack(values: Any, axis: int = 0, device: Device | None = None) -> Tensor:
    if device is not None:
        values = [transfer_to(value, device) for value in values]
    return apply(ops.stack, (values, axis), {})


@functools.wraps(ops.constant)
def constant(value: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return Tensor.constant(value, dtype=dtype, device=device)


@functools.wraps(ops.constant_external)
def constant_external(name: str, type: TensorType) -> Any:
    if not in_graph():
        raise TypeError(
            f"constant_external: {name!r} is bound when a graph is loaded, and no graph is being built; use a Tensor"
        )
    return apply(ops.constant_external, (name, type), {})


@functools.wraps(ops.buffer_store)
def buffer_store(destination: Tensor, source: TensorValueLike) -> None:
    _store(destination, source, None)


@functools.wraps(ops.buffer_store_slice)
def buffer_store_slice(destination: Tensor, source: TensorValueLike, indices: Any) -> None:
    _store(destination, source, indices)


def _store(destination: Tensor, source: TensorValueLike, indices: Any) -> None:
    if isinstance(destination, Tensor) and destination._cell is not None:
        mutation.store(destination, source, indices)
    elif indices is None:
        ops.buffer_store(destination, source)
    else:
        ops.buffer_store_slice(destination, source, indices)


__getattr__ = lazy_names(__name__)
