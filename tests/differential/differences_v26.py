"""The intended differences of ops that 26.x has and 25.7 has not."""

from __future__ import annotations

from tests.differential.rule import Difference

_FAMILY = ("graph_v26",)
_ERROR = "^!"

V26: tuple[Difference, ...] = (
    Difference(
        "scatter reductions want numbers, integers as indices, and updates of the shape that the indices say",
        "a guard: in 26.7 others are staged, and the kernel would read outside",
        _FAMILY,
        program="scatter_",
        here=_ERROR,
    ),
    Difference(
        "scatter reductions take every integer type as indices",
        "an extension: si32 and si64 in 26.7",
        _FAMILY,
        program=r"; ui8\[[^;]*: ops.scatter_",
        there="^!ValueError",
        here=r"^\w+\[",
    ),
    Difference(
        "`prod`, `bottom_k` and `ceil` refuse bools, `ceil` integers, `bottom_k` counts and axes that do not fit",
        "a guard: in 26.7 they are staged, or a ZeroDivisionError",
        _FAMILY,
        program="prod|bottom_k|ceil",
        here=_ERROR,
    ),
    Difference(
        "`group_norm` wants floats, and groups that divide the channels",
        "a guard: in 26.7 others are staged",
        _FAMILY,
        program="group_norm",
        here=_ERROR,
    ),
    Difference(
        "`resize_linear` and `resize_bicubic` want floats; `resize_bicubic` keeps the batch and the channels",
        "a guard: in 26.7 others are staged",
        _FAMILY,
        program="resize_(linear|bicubic)",
        here=_ERROR,
    ),
    Difference(
        "`roi_align` wants floats, regions of five columns, and sizes of 1 or more",
        "a guard: in 26.7 others are staged",
        _FAMILY,
        program="roi_align",
        here=_ERROR,
    ),
    Difference(
        "boxes and scores of `non_maximum_suppression` are of one floating-point type, and their shapes match",
        "a guard: in 26.7 others are staged",
        _FAMILY,
        program="non_maximum_suppression",
        here=_ERROR,
    ),
    Difference(
        "the limits of `non_maximum_suppression` may be numbers",
        "an extension: a TypeError in 26.7",
        _FAMILY,
        program="non_maximum_suppression",
        there="^!TypeError",
    ),
    Difference(
        "a number below 0 that is divided as a `Dim` is rounded down",
        "as Python's; MAX rounds to 0, but no size is below 0",
        ("values",),
        program=r"^sized\(.* - .*//",
        there=r"^dim \[-?\d+\]$",
        here=r"^dim \[-\d+\]$",
    ),
    Difference(
        "a tensor is contiguous whatever the strides of its axes of one element or none are",
        "as in NumPy; False in MAX",
        ("values",),
        program=r"is_contiguous$",
        there="^False$",
        here="^True$",
    ),
    Difference(
        "results of `parallel` have the types that are stated",
        "a guard: in 26.7 others are staged",
        _FAMILY,
        program=r"parallel\(.*a > a",
        here=_ERROR,
    ),
    Difference(
        "some keywords of 26.7 are errors: of MoE, MoEGate, KVCacheParams, KVCacheMetrics, QuantConfig, `is_sharding`",
        "a keyword that is not obeyed is an error: remote caches, caches of 26.7, formats of GPUs, classes of parts",
        ("layer_keywords",),
        program=r"MoE|KVCache|QuantConfig|is_sharding|LatentAttentionWithRope",
        there="^True$",
        here="^False$",
    ),
    Difference(
        "elements of eager tensors are assigned by NumPy's basic indexing, also numbers and arrays, with broadcasting",
        "an extension: in MAX tensors of the exact shape only, without `None` and steps back; 25.7 has no assignment",
        ("eager_setitem",),
        there="^!",
        here="^tensor",
    ),
)
