"""Ops: functions that stage an operation into the current graph and return its result.

Operands are tensors, or anything that converts to one: numbers, arrays, dimensions, shapes (see `TensorValue`).

Ops and modules are loaded when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from max._names import lazy_names
from max.graph.ops.devices.same_device import assert_same_device
from max.graph.ops.images.interpolation import InterpolationMode
from max.graph.type import DeviceRef, TensorType

if TYPE_CHECKING:
    from max.graph.ops import allreduce, random
    from max.graph.ops import complex as complex
    from max.graph.ops import elementwise as elementwise
    from max.graph.ops.control.buffer import (
        buffer_create,
        buffer_load,
        buffer_store,
        buffer_store_slice,
    )
    from max.graph.ops.control.call import call
    from max.graph.ops.control.cond import cond
    from max.graph.ops.control.custom import custom, inplace_custom
    from max.graph.ops.control.print import print
    from max.graph.ops.control.while_loop import while_loop
    from max.graph.ops.creation.constant import constant, constant_external
    from max.graph.ops.creation.range import range
    from max.graph.ops.creation.window import band_part, hann_window
    from max.graph.ops.devices.collectives import allgather
    from max.graph.ops.devices.launches import (
        parallel,
        shard_and_stack,
        side_stream,
        transfer_to,
    )
    from max.graph.ops.elementwise import (
        abs,
        acos,
        add,
        atanh,
        cast,
        ceil,
        cos,
        div,
        equal,
        erf,
        exp,
        floor,
        floor_div,
        gelu,
        greater,
        greater_equal,
        is_inf,
        is_nan,
        log,
        log1p,
        logical_and,
        logical_not,
        logical_or,
        logical_xor,
        mod,
        mul,
        negate,
        not_equal,
        pow,
        relu,
        round,
        rsqrt,
        sigmoid,
        silu,
        sin,
        sqrt,
        sub,
        tanh,
        trunc,
        where,
    )
    from max.graph.ops.images.detection import non_maximum_suppression, roi_align
    from max.graph.ops.images.pooling import avg_pool2d, max_pool2d
    from max.graph.ops.images.resample import resize_bicubic, resize_linear, resize_nearest
    from max.graph.ops.images.resize import fold, resize
    from max.graph.ops.movement.broadcast import broadcast_to
    from max.graph.ops.movement.concat import chunk, concat, pad, split, stack
    from max.graph.ops.movement.gather import (
        gather,
        gather_nd,
        scatter,
        scatter_add,
        scatter_max,
        scatter_min,
        scatter_mul,
        scatter_nd,
        scatter_nd_add,
        scatter_nd_max,
        scatter_nd_min,
        scatter_nd_mul,
    )
    from max.graph.ops.movement.masking import masked_scatter, nonzero
    from max.graph.ops.movement.repeat import repeat_interleave, tile
    from max.graph.ops.movement.shape import (
        as_interleaved_complex,
        flatten,
        permute,
        rebind,
        reshape,
        shape_to_tensor,
        squeeze,
        transpose,
        unsqueeze,
    )
    from max.graph.ops.movement.slicing import slice_tensor
    from max.graph.ops.products.conv import conv2d, conv2d_transpose, conv3d
    from max.graph.ops.products.irfft import irfft
    from max.graph.ops.products.matmul import matmul, outer
    from max.graph.ops.products.quantized import dequantize, qmatmul, quantize
    from max.graph.ops.reductions.normalization import group_norm, layer_norm, rms_norm
    from max.graph.ops.reductions.reduction import (
        argmax,
        argmin,
        argsort,
        bottom_k,
        cumsum,
        logsoftmax,
        max,
        mean,
        min,
        prod,
        softmax,
        sum,
        top_k,
    )

_MODULES = {
    "max.graph.ops.control.buffer": "buffer_create buffer_load buffer_store buffer_store_slice",
    "max.graph.ops.control.call": "call",
    "max.graph.ops.control.cond": "cond",
    "max.graph.ops.control.custom": "custom inplace_custom",
    "max.graph.ops.control.print": "print",
    "max.graph.ops.control.while_loop": "while_loop",
    "max.graph.ops.creation.constant": "constant constant_external",
    "max.graph.ops.creation.range": "range",
    "max.graph.ops.creation.window": "band_part hann_window",
    "max.graph.ops.devices.collectives": "allgather",
    "max.graph.ops.devices.launches": "parallel shard_and_stack side_stream transfer_to",
    "max.graph.ops.elementwise": "abs acos add atanh cast ceil cos div equal erf exp floor floor_div gelu "
    "greater greater_equal is_inf is_nan log log1p logical_and logical_not "
    "logical_or logical_xor mod mul negate not_equal pow relu round rsqrt "
    "sigmoid silu sin sqrt sub tanh trunc where",
    "max.graph.ops.images.detection": "non_maximum_suppression roi_align",
    "max.graph.ops.images.pooling": "avg_pool2d max_pool2d",
    "max.graph.ops.images.resample": "resize_bicubic resize_linear resize_nearest",
    "max.graph.ops.images.resize": "fold resize",
    "max.graph.ops.movement.broadcast": "broadcast_to",
    "max.graph.ops.movement.concat": "chunk concat pad split stack",
    "max.graph.ops.movement.gather": "gather gather_nd scatter scatter_add scatter_max scatter_min "
    "scatter_mul scatter_nd scatter_nd_add scatter_nd_max scatter_nd_min "
    "scatter_nd_mul",
    "max.graph.ops.movement.masking": "masked_scatter nonzero",
    "max.graph.ops.movement.repeat": "repeat_interleave tile",
    "max.graph.ops.movement.shape": "as_interleaved_complex flatten permute rebind reshape shape_to_tensor "
    "squeeze transpose unsqueeze",
    "max.graph.ops.movement.slicing": "slice_tensor",
    "max.graph.ops.products.conv": "conv2d conv2d_transpose conv3d",
    "max.graph.ops.products.irfft": "irfft",
    "max.graph.ops.products.matmul": "matmul outer",
    "max.graph.ops.products.quantized": "dequantize qmatmul quantize",
    "max.graph.ops.reductions.normalization": "group_norm layer_norm rms_norm",
    "max.graph.ops.reductions.reduction": "argmax argmin argsort bottom_k cumsum logsoftmax max mean min prod "
    "softmax sum top_k",
}
"""The names of each module."""
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Callable",
    "DeviceRef",
    "InterpolationMode",
    "TensorType",
    "abs",
    "acos",
    "add",
    "allgather",
    "allreduce",
    "argmax",
    "argmin",
    "argsort",
    "as_interleaved_complex",
    "assert_same_device",
    "atanh",
    "avg_pool2d",
    "band_part",
    "bottom_k",
    "broadcast_to",
    "buffer_create",
    "buffer_load",
    "buffer_store",
    "buffer_store_slice",
    "call",
    "cast",
    "ceil",
    "chunk",
    "concat",
    "cond",
    "constant",
    "constant_external",
    "conv2d",
    "conv2d_transpose",
    "conv3d",
    "cos",
    "cumsum",
    "custom",
    "dequantize",
    "div",
    "equal",
    "erf",
    "exp",
    "flatten",
    "floor",
    "floor_div",
    "fold",
    "gather",
    "gather_nd",
    "gelu",
    "greater",
    "greater_equal",
    "group_norm",
    "hann_window",
    "inplace_custom",
    "irfft",
    "is_inf",
    "is_nan",
    "layer_norm",
    "log",
    "log1p",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsoftmax",
    "masked_scatter",
    "matmul",
    "max",
    "max_pool2d",
    "mean",
    "min",
    "mod",
    "mul",
    "negate",
    "non_maximum_suppression",
    "nonzero",
    "not_equal",
    "outer",
    "pad",
    "parallel",
    "permute",
    "pow",
    "print",
    "prod",
    "qmatmul",
    "quantize",
    "random",
    "range",
    "rebind",
    "relu",
    "repeat_interleave",
    "reshape",
    "resize",
    "resize_bicubic",
    "resize_linear",
    "resize_nearest",
    "rms_norm",
    "roi_align",
    "round",
    "rsqrt",
    "scatter",
    "scatter_add",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_nd",
    "scatter_nd_add",
    "scatter_nd_max",
    "scatter_nd_min",
    "scatter_nd_mul",
    "shape_to_tensor",
    "shard_and_stack",
    "side_stream",
    "sigmoid",
    "silu",
    "sin",
    "slice_tensor",
    "softmax",
    "split",
    "sqrt",
    "squeeze",
    "stack",
    "sub",
    "sum",
    "tanh",
    "tile",
    "top_k",
    "transfer_to",
    "transpose",
    "trunc",
    "unsqueeze",
    "where",
    "while_loop",
]


def _with_named_errors(value: Any) -> Any:
    """An op as users see it: its errors name it. Ops that call each other do so in their own modules, without this."""
    if not isinstance(value, FunctionType):
        return value
    return import_module("max.graph.ops.staging.named_errors").name_errors(value)


__getattr__ = lazy_names(__name__, _WHERE, submodules=True, wrap=_with_named_errors)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
