"""Cases of ops over images, volumes and spectra, against torch and NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from max.graph import ops
from max.graph.ops import InterpolationMode
from max.graph.type import ConvInputLayout, FilterLayout
from tests.ops.case import OpCase, torch_reference

IMAGE = (1, 2, 3, 5, 9, 14)


def _first(x: Any) -> Any:
    """Moves channels after the first axis, as torch expects them."""
    return x.movedim(-1, 1)


def _last(x: Any) -> Any:
    return x.movedim(1, -1)


def _exact(reference: Any) -> Any:
    """A reference that torch has for floats only: integers are computed as floats and wrapped."""

    def whole(t: Any, *operands: Any) -> Any:
        dtype = operands[0].dtype
        if dtype.is_floating_point:
            return reference(t, *operands)
        found = reference(t, *(x.double() for x in operands))
        return found.round().long().to(dtype)

    return torch_reference(whole)


def _padded(t: Any, x: Any, padding: Sequence[int]) -> Any:
    pairs = list(zip(padding[0::2], padding[1::2], strict=True))
    return t.nn.functional.pad(x, [n for pair in reversed(pairs) for n in pair])


def _conv(stride: Any, dilation: Any, padding: Any, groups: int) -> Any:
    """Convolves images or volumes with channels last by filters with features last, with an optional bias."""

    def reference(t: Any, x: Any, w: Any, b: Any = None) -> Any:
        conv = t.nn.functional.conv2d if x.ndim == 4 else t.nn.functional.conv3d
        weight = w.movedim((-1, -2), (0, 1))
        return _last(conv(_padded(t, _first(x), padding), weight, b, stride, 0, dilation, groups))

    return _exact(reference)


def _conv_case(
    name: str,
    shape: tuple[Any, ...],
    weight: tuple[Any, ...],
    stride: Any = (1, 1),
    dilation: Any = (1, 1),
    padding: Any = (0, 0, 0, 0),
    groups: int = 1,
    bias: bool = False,
    dtypes: tuple[str, ...] = ("float32",),
    sizes: tuple[int, ...] = IMAGE,
) -> OpCase:
    def build(x: Any, w: Any, b: Any = None) -> Any:
        op = ops.conv2d if len(shape) == 4 else ops.conv3d
        return op(x, w, stride, dilation, padding, groups, b)

    return OpCase(
        name,
        build,
        _conv(stride, dilation, padding, groups),
        (shape, weight, *([(weight[-1],)] if bias else [])),
        dtypes,
        scale=8.0,
        sizes=sizes,
    )


def _conv_transpose(stride: Any, dilation: Any, padding: Sequence[int], more: Sequence[int]) -> Any:
    def reference(t: Any, x: Any, w: Any) -> Any:
        y = t.nn.functional.conv_transpose2d(
            _first(x), w.movedim((3, 2), (0, 1)), None, stride, 0, 0, 1, dilation
        )
        # pads by the output padding after the axes, then crops each side
        y = t.nn.functional.pad(y, [0, more[1], 0, more[0]])
        top, bottom, left, right = padding
        return _last(y)[:, top : y.shape[2] - bottom, left : y.shape[3] - right]

    return _exact(reference)


def _pool(kind: str, kernel: Any, **options: Any) -> Any:
    def reference(t: Any, x: Any) -> Any:
        return _last(getattr(t.nn.functional, kind)(_first(x), kernel, **options))

    return _exact(reference)


CONVS = (
    _conv_case(
        "conv2d",
        ("n", "h", "w", 3),
        (3, 3, 3, 40),
        padding=(1, 1, 1, 1),
        bias=True,
        dtypes=("float32", "float64", "float16", "bfloat16", "int32"),
    ),
    _conv_case(
        "conv2d_strides",
        ("n", "h", "w", 5),
        (3, 2, 5, 7),
        stride=(2, 3),
        dilation=(1, 2),
        padding=(0, 3, 2, 1),
        dtypes=("float32", "int8"),
        sizes=(2, 3, 8, 15, 30),
    ),
    _conv_case(
        "conv2d_groups",
        ("n", "h", "w", 12),
        (2, 3, 4, 9),
        stride=(1, 2),
        dilation=(2, 1),
        padding=(1, 1, 2, 0),
        groups=3,
        bias=True,
        dtypes=("float32", "bfloat16"),
        sizes=(2, 3, 13),
    ),
    _conv_case(
        "conv2d_depthwise",
        ("n", "h", "w", 19),
        (3, 3, 1, 19),
        stride=(2, 1),
        padding=(1, 0, 1, 2),
        groups=19,
        bias=True,
        dtypes=("float32", "bfloat16"),
        sizes=(2, 3, 13),
    ),
    _conv_case(
        "conv2d_depth_multiplier",
        ("n", "h", "w", 3),
        (2, 2, 1, 6),
        groups=3,
        sizes=(2, 5, 11),
    ),
    _conv_case("conv2d_pointwise", ("n", "h", "w", 5), (1, 1, 5, 7), bias=True),
    _conv_case("conv2d_symbolic_filter", ("n", 9, 13, "c"), ("r", "s", "c", "f"), sizes=(1, 3, 5)),
    OpCase(
        "conv2d_torch_layouts",
        lambda x, w, b: ops.conv2d(
            x,
            w,
            padding=(1, 1, 2, 2),
            bias=b,
            input_layout=ConvInputLayout.NCHW,
            filter_layout=FilterLayout.FCRS,
        ),
        torch_reference(lambda t, x, w, b: t.nn.functional.conv2d(x, w, b, padding=(1, 2))),
        (("n", 6, "h", "w"), (9, 6, 3, 2), (9,)),
        ("float32", "bfloat16"),
        scale=8.0,
        sizes=IMAGE,
    ),
    _conv_case(
        "conv3d",
        ("n", "d", "h", "w", 4),
        (2, 3, 2, 2, 6),
        stride=(1, 2, 1),
        dilation=(1, 1, 2),
        padding=(0, 1, 1, 1, 2, 0),
        groups=2,
        bias=True,
        dtypes=("float32", "bfloat16"),
        sizes=(2, 3, 6),
    ),
    OpCase(
        "conv3d_torch_layouts",
        lambda x, w: ops.conv3d(
            x, w, input_layout=ConvInputLayout.NCHW, filter_layout=FilterLayout.FCQRS
        ),
        torch_reference(lambda t, x, w: t.nn.functional.conv3d(x, w)),
        (("n", 3, "d", "h", "w"), (5, 3, 2, 2, 2)),
        ("float32",),
        scale=8.0,
        sizes=(2, 3, 6),
    ),
    OpCase(
        "conv2d_transpose",
        lambda x, w: ops.conv2d_transpose(x, w, (2, 3), (1, 2), (1, 0, 2, 1), (1, 2)),
        _conv_transpose((2, 3), (1, 2), (1, 0, 2, 1), (1, 2)),
        (("n", "h", "w", 5), (3, 2, 35, 5)),
        ("float32", "bfloat16", "int32"),
        scale=8.0,
        sizes=(1, 2, 3, 13),
    ),
    OpCase(
        "conv2d_transpose_narrow",
        lambda x, w: ops.conv2d_transpose(x, w, (3, 4)),
        _conv_transpose((3, 4), (1, 1), (0, 0, 0, 0), (0, 0)),
        (("n", "h", "w", 2), (2, 1, 3, 2)),
        ("float32",),
        scale=8.0,
        sizes=(1, 2, 3, 13),
    ),
    OpCase(
        "conv2d_transpose_torch_layouts",
        lambda x, w, b: ops.conv2d_transpose(
            x,
            w,
            (2, 2),
            padding=(1, 1, 0, 0),
            bias=b,
            input_layout=ConvInputLayout.NCHW,
            filter_layout=FilterLayout.CFRS,
        ),
        torch_reference(
            lambda t, x, w, b: t.nn.functional.conv_transpose2d(x, w, b, (2, 2), (1, 0))
        ),
        (("n", 4, "h", "w"), (4, 6, 3, 3), (6,)),
        ("float32",),
        scale=8.0,
        sizes=(1, 2, 3, 13),
    ),
)

POOLS = (
    OpCase(
        "max_pool2d",
        lambda x: ops.max_pool2d(x, (3, 2), (2, 1), padding=(1, 0)),
        _pool("max_pool2d", (3, 2), stride=(2, 1), padding=(1, 0)),
        (("n", "h", "w", "c"),),
        ("float32", "float64", "bfloat16"),
        sizes=(2, 3, 7, 18),
    ),
    OpCase(
        "max_pool2d_int",
        lambda x: ops.max_pool2d(x, (2, 2)),
        _pool("max_pool2d", 2, stride=1),
        ((2, "h", "w", 3),),
        ("int8", "uint8", "int64"),
        sizes=(2, 5),
    ),
    OpCase(
        "max_pool2d_ceil",
        lambda x: ops.max_pool2d(x, (2, 3), (3, 2), (1, 2), 1, ceil_mode=True),
        _pool("max_pool2d", (2, 3), stride=(3, 2), padding=1, dilation=(1, 2), ceil_mode=True),
        (("n", "h", "w", "c"),),
        ("float32",),
        sizes=(3, 4, 5, 18),
    ),
    OpCase(
        "avg_pool2d",
        lambda x: ops.avg_pool2d(x, (3, 2), (2, 1), padding=(1, 0)),
        _pool("avg_pool2d", (3, 2), stride=(2, 1), padding=(1, 0)),
        (("n", "h", "w", "c"),),
        ("float32", "float64", "bfloat16"),
        sizes=(2, 3, 7, 18),
    ),
    OpCase(
        "avg_pool2d_ceil",
        lambda x: ops.avg_pool2d(x, (3, 3), 2, padding=1, ceil_mode=True),
        _pool("avg_pool2d", 3, stride=2, padding=1, ceil_mode=True),
        (("n", "h", "w", "c"),),
        ("float32",),
        sizes=(2, 3, 4, 7, 18),
    ),
    OpCase(
        "avg_pool2d_inside",
        lambda x: ops.avg_pool2d(x, (2, 3), 3, padding=1, ceil_mode=True, count_boundary=False),
        _pool(
            "avg_pool2d",
            (2, 3),
            stride=3,
            padding=1,
            ceil_mode=True,
            count_include_pad=False,
        ),
        (("n", "h", "w", "c"),),
        ("float32",),
        sizes=(2, 3, 4, 7, 18),
    ),
    OpCase(
        "avg_pool2d_dilated",
        lambda x: ops.avg_pool2d(x, (2, 2), 1, (2, 3)),
        lambda x: (x[:, :-2, :-3] + x[:, 2:, :-3] + x[:, :-2, 3:] + x[:, 2:, 3:]) / 4,
        (("n", "h", "w", "c"),),
        ("float32",),
        sizes=(4, 9),
    ),
)


def _resize(mode: InterpolationMode, size: tuple[int, int]) -> Any:
    return _exact(lambda t, x: t.nn.functional.interpolate(x, size, mode=str(mode)))


def _resize_case(mode: InterpolationMode, size: tuple[int, int], dtypes: tuple[str, ...]) -> OpCase:
    return OpCase(
        f"resize_{mode}_{size[0]}",
        lambda x: ops.resize(x, [x.shape[0], 3, *size], mode),
        _resize(mode, size),
        (("n", 3, "h", "w"),),
        dtypes,
        scale=2.0,
        sizes=(1, 2, 5, 11),
    )


RESIZES = (
    _resize_case(
        InterpolationMode.NEAREST, (7, 18), ("float32", "float16", "bfloat16", "uint8", "int64")
    ),
    _resize_case(InterpolationMode.BILINEAR, (7, 18), ("float32", "float64", "bfloat16")),
    _resize_case(InterpolationMode.BILINEAR, (3, 4), ("float32",)),
    _resize_case(InterpolationMode.BICUBIC, (7, 18), ("float32", "float64", "float16")),
    _resize_case(InterpolationMode.BICUBIC, (3, 4), ("float32", "bfloat16")),
    OpCase(
        "resize_symbolic",
        lambda x: ops.resize(x, [*x.shape[:2], x.shape[2] * 2, x.shape[3] * 3 + 1]),
        lambda x: _resize(InterpolationMode.BILINEAR, (x.shape[2] * 2, x.shape[3] * 3 + 1))(x),
        (("n", "c", "h", "w"),),
        ("float32",),
        sizes=(1, 2, 5, 11),
    ),
)

FOLDS = (
    OpCase(
        "fold",
        lambda x: ops.fold(x, (7, 20), (3, 2), (1, 2), (2, 3), (1, 0)),
        _exact(lambda t, x: t.nn.functional.fold(x, (7, 20), (3, 2), (2, 3), (1, 0), (1, 2))),
        (("n", 12, 5 * 9),),
        ("float32", "float64", "bfloat16", "int32"),
        scale=4.0,
        sizes=(1, 3),
    ),
    OpCase(
        "fold_symbolic",
        lambda x: ops.fold(x, (x.shape[2] + 1, 2), (2, 2)),
        lambda x: _exact(lambda t, x: t.nn.functional.fold(x, (x.shape[2] + 1, 2), (2, 2)))(x),
        (("n", 12, "l"),),
        ("float32",),
        sizes=(1, 3, 20),
    ),
)


def _irfft_case(name: str, n: int | None, size: int, axis: int, dtypes: tuple[str, ...]) -> OpCase:
    return OpCase(
        name,
        lambda x: ops.irfft(x, n, axis, "ortho", input_is_complex=True),
        lambda x: np.fft.irfft(x[..., 0] + 1j * x[..., 1], n, axis, "ortho"),
        (("a", size, "b", 2) if axis == 1 else ("a", "b", size, 2),),
        dtypes,
        scale=4.0,
        sizes=(1, 2, 5),
    )


FOURIER = (
    _irfft_case("irfft", None, 33, -1, ("float32", "float64", "bfloat16")),
    _irfft_case("irfft_odd", 45, 23, 1, ("float32",)),
    _irfft_case("irfft_prime", 31, 40, -1, ("float32",)),
    _irfft_case("irfft_padded", 48, 9, 1, ("float64", "float16")),
    _irfft_case("irfft_short", 1, 3, 1, ("float32",)),
    OpCase(
        "irfft_real",
        lambda x: ops.irfft(x, 18, 0, "forward"),
        lambda x: np.fft.irfft(x, 18, 0, "forward"),
        (("a", "b"),),
        ("float32", "float64"),
        scale=8.0,
    ),
)

SPATIAL: tuple[OpCase, ...] = (*CONVS, *POOLS, *RESIZES, *FOLDS, *FOURIER)
