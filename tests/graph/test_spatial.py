"""Staging of ops over images and volumes: shapes, and error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from max.graph.type import ConvInputLayout, FilterLayout
from max.mlir.dims import DimExpr
from max.mlir.ops.spatial import pooled_size

CPU = DeviceRef.CPU()
F32 = DType.float32


def staged(types: list[TensorType], build: Callable[..., TensorValue]) -> list[Any]:
    """Returns the result shape of a graph function for inputs of these types."""
    with Graph("spatial", input_types=types) as graph:
        return list(build(*(value.tensor for value in graph.inputs)).shape)


def image(*shape: Any, dtype: DType = F32) -> TensorType:
    return TensorType(dtype, shape, CPU)


def test_shapes_of_symbolic_images() -> None:
    x, w = image("n", "h", "w", 4), image(3, 3, 4, 8)
    size = [Dim("n"), (Dim("h") + 1) // 2, Dim("w"), Dim(8)]
    assert staged([x, w], lambda x, w: ops.conv2d(x, w, (2, 1), padding=(1, 1, 1, 1))) == size
    w = image(2, 2, 8, 4)
    size = [Dim("n"), 2 * Dim("h"), 2 * Dim("w"), Dim(8)]
    assert staged([x, w], lambda x, w: ops.conv2d_transpose(x, w, (2, 2))) == size
    assert staged([x], lambda x: ops.max_pool2d(x, (2, 2), 2, ceil_mode=True)) == [
        Dim("n"),
        (Dim("h") + 1) // 2,
        (Dim("w") + 1) // 2,
        Dim(4),
    ]


@settings(max_examples=60)
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.data(),
    st.booleans(),
)  # fmt: skip
def test_pooled_size_is_that_of_torch(
    size: int, taps: int, dilation: int, stride: int, data: st.DataObject, ceil: bool
) -> None:
    import torch

    padding = data.draw(st.integers(0, taps // 2))
    found = pooled_size(
        DimExpr.constant(size), taps, dilation, stride, padding, padding, ceil
    ).value
    x = torch.zeros(1, 1, size)
    try:
        wanted = torch.nn.functional.max_pool1d(x, taps, stride, padding, dilation, ceil).shape[2]
    except RuntimeError:
        return
    assert found == wanted


CONV_MISTAKES: list[tuple[str, list[TensorType], Callable[..., TensorValue], str]] = [
    ("rank", [image(1, 5, 5), image(3, 3, 2, 4)], ops.conv2d, "both must have rank 4"),
    (
        "channels",
        [image(1, 5, 5, 3), image(3, 3, 2, 4)],
        ops.conv2d,
        r"conv: the input f32\[1, 5, 5, 3\] has 3 channels; the filter f32\[3, 3, 2, 4\] takes 2",
    ),
    (
        "groups",
        [image(1, 5, 5, 4), image(3, 3, 2, 5)],
        lambda x, w: ops.conv2d(x, w, groups=2),
        "gives 5 channels, which is not a multiple of groups, 2",
    ),
    (
        "no group",
        [image(1, 5, 5, 4), image(3, 3, 2, 5)],
        lambda x, w: ops.conv2d(x, w, groups=0),
        "groups is .*expected 1 int.*, 1 or more",
    ),
    (
        "window",
        [image(1, 5, 2, 2), image(3, 3, 2, 4)],
        ops.conv2d,
        "the window reaches over 3 elements, axis 2 of f32.1, 5, 2, 2. has 2 with its padding",
    ),
    (
        "stride",
        [image(1, 5, 5, 2), image(3, 3, 2, 4)],
        lambda x, w: ops.conv2d(x, w, stride=(0, 1)),
        "conv2d: stride is .0, 1., expected 2 ints, 1 or more",
    ),
    (
        "padding",
        [image(1, 5, 5, 2), image(3, 3, 2, 4)],
        lambda x, w: ops.conv2d(x, w, padding=(1, 1)),  # pyright: ignore[reportArgumentType]
        "conv2d: padding is .1, 1., expected 4 ints",
    ),
    (
        "bias",
        [image(1, 5, 5, 2), image(3, 3, 2, 4), image(3)],
        lambda x, w, b: ops.conv2d(x, w, bias=b),
        r"conv2d: the bias is f32\[3\], expected shape \[4\]",
    ),
    (
        "layout",
        [image(1, 5, 5, 2), image(3, 3, 2, 4)],
        lambda x, w: ops.conv2d(x, w, filter_layout=FilterLayout.QRSCF),
        "conv2d: the filter layout is QRSCF, expected RSCF, FCRS, CFRS",
    ),
    (
        "volume layout",
        [image(1, 2, 5, 5, 2), image(1, 3, 3, 2, 4)],
        lambda x, w: ops.conv3d(x, w, filter_layout=FilterLayout.RSCF),
        "conv3d: the filter layout is RSCF, expected QRSCF, FCQRS",
    ),
    (
        "transposed channels",
        [image(1, 5, 5, 2), image(3, 3, 2, 4)],
        ops.conv2d_transpose,
        "conv_transpose: the input .* has 2 channels, the filter .* takes 4",
    ),
    (
        "output padding",
        [image(1, 5, 5, 4), image(3, 3, 2, 4)],
        lambda x, w: ops.conv2d_transpose(x, w, output_paddings=(1, 0)),
        "output padding 1 of axis 1 must be less than its stride 1 or its dilation 1",
    ),
    (
        "transposed filter",
        [image(1, 5, 5, 4), image("r", 3, 2, 4)],
        ops.conv2d_transpose,
        "axis 0 of the filter .* is not static",
    ),
    (
        "cut",
        [image(1, 2, 2, 4), image(1, 1, 2, 4)],
        lambda x, w: ops.conv2d_transpose(x, w, padding=(2, 2, 0, 0)),
        "axis 1 of .* would have size -2; the padding 4 is too large",
    ),
    ("pool rank", [image(5, 5, 2)], lambda x: ops.max_pool2d(x, (2, 2)), "expected rank 4"),
    (
        "pool window",
        [image(1, 5, 2, 2)],
        lambda x: ops.avg_pool2d(x, (3, 3)),
        "avg_pool: the window reaches over 3 elements, axis 2 .* has 2 with its padding",
    ),
    (
        "pool padding",
        [image(1, 5, 5, 2)],
        lambda x: ops.max_pool2d(x, (2, 2), padding=2),
        "the padding .2, 2. of axis 1 is more than half of the window",
    ),
    (
        "pool kernel",
        [image(1, 5, 5, 2)],
        lambda x: ops.max_pool2d(x, ("k", 2)),
        "max_pool2d: kernel_size is .*expected static sizes",
    ),
    (
        "resize rank",
        [image(2, 5, 5)],
        lambda x: ops.resize(x, [2, 4, 4]),
        "resize: .*both must have rank 4",
    ),
    (
        "resize channels",
        [image(1, 2, 5, 5)],
        lambda x: ops.resize(x, [1, 3, 4, 4]),
        "resize: .*another H and W only",
    ),
    (
        "resize nothing",
        [image(1, 2, 0, 5)],
        lambda x: ops.resize(x, [1, 2, 4, 4]),
        "resize: axis 2 of .* is empty",
    ),
    (
        "resize mode",
        [image(1, 2, 5, 5)],
        lambda x: ops.resize(x, [1, 2, 4, 4], "area"),  # pyright: ignore[reportArgumentType]
        "'area' is not a valid InterpolationMode",
    ),
    (
        "fold channels",
        [image(1, 10, 4)],
        lambda x: ops.fold(x, (3, 3), (2, 2)),
        "fold: axis 1 of .* is not a multiple of 4",
    ),
    (
        "fold blocks",
        [image(1, 8, 5)],
        lambda x: ops.fold(x, (3, 3), (2, 2)),
        "fold: .* has 5 blocks, .* has 4",
    ),
    (
        "fold window",
        [image(1, 8, 5)],
        lambda x: ops.fold(x, (1, 3), (2, 2)),
        "fold: the window reaches over 2 elements, axis 2 .* has 1",
    ),
    (
        "irfft axis",
        [image(3, 5, 2)],
        lambda x: ops.irfft(x, axis=2, input_is_complex=True),
        "irfft: axis 2 is out of range for a tensor of rank 2",
    ),
    (
        "irfft complex",
        [image(3, 5)],
        lambda x: ops.irfft(x, input_is_complex=True),
        "irfft: .*expected a last axis of size 2",
    ),
    ("irfft symbolic", [image("m")], ops.irfft, "irfft: axis -1 of .* is symbolic; say n"),
    ("irfft short", [image(1)], ops.irfft, "irfft: n is 0, expected 1 or more"),
    (
        "irfft normalization",
        [image(5)],
        lambda x: ops.irfft(x, normalization="none"),
        "'none' is not a valid Normalization",
    ),
    (
        "pool stride",
        [image(1, 5, 5, 2)],
        lambda x: ops.max_pool2d(x, (2, 2), stride=0),
        "max_pool2d: stride is 0, expected one int or two, 1 or more",
    ),
]


@pytest.mark.parametrize(
    ("types", "build", "message"), [m[1:] for m in CONV_MISTAKES], ids=[m[0] for m in CONV_MISTAKES]
)
def test_mistakes(types: list[TensorType], build: Callable[..., TensorValue], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        staged(types, build)


def test_wrong_types() -> None:
    x = image(1, 5, 5, 2)
    with pytest.raises(TypeError, match="conv: .*expected numbers of one dtype"):
        staged(
            [image(1, 5, 5, 2, dtype=DType.bool), image(3, 3, 2, 4, dtype=DType.bool)], ops.conv2d
        )
    with pytest.raises(TypeError, match="conv2d: stride is .*expected ints"):
        staged([x, image(3, 3, 2, 4)], lambda x, w: ops.conv2d(x, w, stride=(1.5, 1)))  # pyright: ignore[reportArgumentType]
    small = image(1, 2, 5, 5, dtype=DType.uint8)
    with pytest.raises(TypeError, match="resize: .*expected a floating-point type for .* bilinear"):
        staged([small], lambda x: ops.resize(x, [1, 2, 4, 4]))
    with pytest.raises(TypeError, match="irfft: .*expected a floating-point type"):
        staged([small], ops.irfft)
    with pytest.raises(TypeError, match="max_pool: .*expected numbers"):
        staged([image(1, 5, 5, 2, dtype=DType.bool)], lambda x: ops.max_pool2d(x, (2, 2)))


def test_filters_may_be_arrays_and_dtypes_mix() -> None:
    weight = np.ones((3, 3, 4, 2))
    with Graph("arrays", input_types=[image(1, 4, 9, 9, dtype=DType.bfloat16)]) as graph:
        y = ops.conv2d(
            graph.inputs[0].tensor, weight, input_layout=ConvInputLayout.NCHW, bias=np.ones(2)
        )
        assert y.dtype is DType.bfloat16
        assert y.shape == [1, 2, 7, 7]
        wide = ops.conv2d(
            ops.permute(graph.inputs[0].tensor, [0, 2, 3, 1]), ops.constant(weight, F32, CPU)
        )
        assert wide.dtype is F32
