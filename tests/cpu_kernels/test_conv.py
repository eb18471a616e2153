"""Convolutions against torch in float64: random shapes, packed filters and others, targets, workers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.kernels.convolution.conv import LOWERINGS
from max._backends.cpu.kernels.convolution.filters import filter_elements
from max._backends.cpu.kernels.products.blocking import FOLDED_SIZE
from max._backends.kernel_call import Operand, Scalar
from max.dtype import DType
from tests.cpu_kernels.harness import run
from tests.tolerance import assert_close

GROUPS = (
    (1, 1, 5), (1, 1, 40), (1, 2, 3), (2, 2, 11), (4, 4, 9), (8, 8, 3), (16, 16, 3), (3, 5, 2), (4, 33, 2), (7, 70, 1),
    (90, 9, 1),
)  # fmt: skip
"""Channels and columns of a group, and groups."""
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64, np.int32)


@dataclass
class Case:
    """A convolution: sizes of the input, the filter's taps, channels and columns of a group."""

    batch: int
    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    channels: int
    columns: int
    groups: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    dtype: Any = np.float32

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)

        def make(*shape: int) -> np.ndarray:
            if np.dtype(self.dtype).kind == "i":
                return rng.integers(-9, 9, shape).astype(self.dtype)
            return rng.standard_normal(shape).astype(np.float32).astype(self.dtype)

        x = make(self.batch, *self.sizes, self.channels * self.groups)
        return x, make(*self.taps, self.channels, self.columns * self.groups)

    def expected(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        spatial = len(self.sizes)
        conv = torch.nn.functional.conv2d if spatial == 2 else torch.nn.functional.conv3d
        pairs = list(zip(self.padding[0::2], self.padding[1::2], strict=True))
        a = torch.from_numpy(x.astype(np.float64)).movedim(-1, 1)
        a = torch.nn.functional.pad(a, [n for pair in reversed(pairs) for n in pair])
        b = torch.from_numpy(w.astype(np.float64)).movedim((-1, -2), (0, 1))
        made = conv(a, b, None, self.stride, 0, self.dilation, self.groups)
        return made.movedim(1, -1).contiguous().numpy()

    def check(self, packed: bool, **options: Any) -> None:
        x, w = self.operands()
        want = self.expected(x, w)
        attributes = {
            "stride": self.stride,
            "dilation": self.dilation,
            "padding": self.padding,
            "groups": self.groups,
        }
        result = [(np.dtype(self.dtype), want.shape)]
        if packed:
            elements = filter_elements(self.taps, self.channels, DType.from_numpy(w.dtype))
            strips = self.groups * -(-self.columns // 32)
            shape = [(w.dtype, (strips, elements))]
            (panels,) = run("mok.pack_filter", [w], shape, {"groups": self.groups}, **options)
            more = {"taps": self.taps, "columns": w.shape[-1]}
            (got,) = run("mok.packed_conv", [x, panels], result, attributes | more, **options)
        else:
            (got,) = run("mo.conv", [x, w], result, attributes, **options)
        assert_close(got, want.astype(self.dtype), scale=4.0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spatial = draw(st.sampled_from((2, 2, 2, 3)))

    def each(low: int, high: int, count: int = spatial) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    taps, dilation, padding = each(1, 4), each(1, 2), each(0, 2, 2 * spatial)
    if draw(st.booleans()):
        padding = (0,) * (2 * spatial)
    least = [
        max(1, (t - 1) * d + 1 - padding[2 * i] - padding[2 * i + 1])
        for i, (t, d) in enumerate(zip(taps, dilation, strict=True))
    ]
    sizes = tuple(n + draw(st.integers(0, 9 if spatial == 2 else 3)) for n in least)
    channels, columns, groups = draw(st.sampled_from(GROUPS))
    return Case(
        draw(st.integers(1, 2)), sizes, taps, channels, columns, groups, each(1, 3), dilation,
        padding, draw(st.sampled_from(DTYPES)),
    )  # fmt: skip


CASES = given(
    case=cases(),
    packed=st.booleans(),
    machine=st.sampled_from(("host", "avx2")),
    workers=st.sampled_from((1, 2)),
)


@settings(max_examples=8, deadline=None)
@CASES
def test_random(case: Case, packed: bool, machine: str, workers: int) -> None:
    alone = case.channels == case.columns == 1
    case.check(packed and not alone, machine=machine, workers=workers)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@CASES
def test_random_long(**drawn: Any) -> None:
    test_random.hypothesis.inner_test(**drawn)  # type: ignore[attr-defined]


@pytest.mark.parametrize("machine", ["host", "avx2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "groups"), [(2, 11), (4, 9), (8, 3), (16, 2)])
def test_narrow_groups(channels: int, groups: int, dtype: Any, machine: str) -> None:
    """Vectors of several groups, the last one in part; tiles of all heights, and taps in the padding."""
    case = Case(2, (6, 17), (3, 2), channels, channels, groups, (2, 1), (1, 2), (1, 1, 2, 0), dtype)
    case.check(packed=False, machine=machine, workers=2)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(
    ("taps", "channels", "groups"),
    [((3, 3), 98, 1), ((3, 2), 36, 2), ((2, 3), 4, 3), ((9, 8), 101, 1)],
)
def test_padding(taps: tuple[int, int], channels: int, groups: int, dtype: Any) -> None:
    """Taps in the padding, for patches read in place and copied; more than 64 taps; odd numbers of 16-bit channels."""
    for padding, dilation in (((2, 1, 1, 3), (1, 1)), ((3, 3, 2, 4), (2, 3))):
        case = Case(2, (17, 23), taps, channels, 34, groups, (1, 2), dilation, padding, dtype)
        case.check(True, workers=2)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
@pytest.mark.parametrize(
    ("dilation", "groups", "machine"), [((9, 17), 1, "host"), ((30, 3), 2, "avx2")]
)
def test_taps_that_whole_tiles_lack(
    dilation: tuple[int, int], groups: int, machine: str, dtype: Any
) -> None:
    """Wide dilations: some register tiles have all taps, some none of a line or column of taps, others some of it."""
    padding = (dilation[0], dilation[0] - 2, dilation[1], dilation[1] + 1)
    case = Case(2, (11, 41), (3, 3), 96, 34, groups, (1, 1), dilation, padding, dtype)
    case.check(True, workers=2, machine=machine)
    case.check(False, workers=1, machine=machine)


@pytest.mark.parametrize("positions", [1, 3, 12, 13, 16, 17, 25, 27, 49, 98])
def test_few_positions(positions: int) -> None:
    """Register tiles of all heights."""
    Case(1, (1, positions), (1, 3), 16, 33, 1, (1, 1), (1, 1), (0, 0, 1, 1)).check(True)


@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("channels", [64, 512])  # sums of 512 channels are folded
def test_strides_and_folds_are_no_part_of_the_code(stride: tuple[int, int], channels: int) -> None:
    def call(stride: tuple[int, int], channels: int) -> tuple[Any, Any, list[Any]]:
        x = Operand(DType.float32, (1, 9, 9, channels))
        strips = Operand(DType.float32, (1, filter_elements((3, 3), channels, DType.float32)))
        sizes = [-(-9 // step) for step in stride]
        made = LOWERINGS["mok.packed_conv"](
            [x, strips],
            [Operand(DType.float32, (1, *sizes, 32))],
            {
                "stride": stride,
                "dilation": (1, 1),
                "padding": (1,) * 4,
                "groups": 1,
                "taps": (3, 3),
            },
            k.host_target(),
        )
        values = [arg.value for arg in made.args if isinstance(arg, Scalar)]
        return made.kernel, made.params, values

    *code, values = call(stride, channels)
    assert code == [*call((1, 1), 64)[:2]]
    assert values == [1, *stride, int(9 * channels > FOLDED_SIZE)]


LONG_SUMS = list(
    itertools.product(
        (((1, 1), 600), ((3, 3), 150), ((7, 7), 3)), (np.float32, ml_dtypes.bfloat16), (True, False)
    )
)


# the host runs all cases, other targets one of each pair with equal taps and dtype
@pytest.mark.parametrize(
    ("taps", "channels", "dtype", "packed", "machine"),
    [
        (*taps, dtype, packed, machine)
        for i, (taps, dtype, packed) in enumerate(LONG_SUMS)
        for machine in ("host", ("avx2", "generic")[(i + i // 2 + i // 4) % 2])
    ],
)
def test_long_sums(
    taps: tuple[int, int], channels: int, dtype: Any, packed: bool, machine: str
) -> None:
    """Patches of many K blocks, which hold a part of a run or several runs, with and without padding."""
    pad = taps[0] // 2
    Case(
        1, (12, 17), taps, channels, 40, 1, (2, 1), (1, 1), (pad, pad, pad, pad), dtype
    ).check(packed, machine=machine)  # fmt: skip
