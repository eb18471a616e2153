"""Convolutions of bytes against sums in int64: random shapes and paddings, targets, workers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu_kernels.harness import run

I8 = np.dtype(np.int8)


def expected(
    x: np.ndarray, w: np.ndarray, stride: tuple[int, ...], dilation: tuple[int, ...],
    padding: tuple[int, ...], fill: int,
) -> np.ndarray:  # fmt: skip
    """The convolution, tap by tap."""
    pads = [(0, 0), padding[:2], padding[2:], (0, 0)]
    x = np.pad(x.astype(np.int64), pads, constant_values=fill)
    sizes = [
        (x.shape[1 + i] - dilation[i] * (w.shape[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    ]
    total = np.zeros((x.shape[0], *sizes, w.shape[3]), np.int64)
    for r, s in product(range(w.shape[0]), range(w.shape[1])):
        rows = slice(r * dilation[0], r * dilation[0] + (sizes[0] - 1) * stride[0] + 1, stride[0])
        columns = slice(
            s * dilation[1], s * dilation[1] + (sizes[1] - 1) * stride[1] + 1, stride[1]
        )
        total += x[:, rows, columns] @ w[r, s].astype(np.int64)
    return total.astype(np.int32)


def check(
    shape: tuple[int, ...], filter_: tuple[int, ...], stride: tuple[int, ...] = (1, 1),
    dilation: tuple[int, ...] = (1, 1), padding: tuple[int, ...] = (0,) * 4, fill: int = 0,
    machine: str = "host", workers: int = 1,
) -> None:  # fmt: skip
    rng = np.random.default_rng(sum(shape) + sum(filter_))
    x, w = (rng.integers(-128, 128, sizes).astype(np.int8) for sizes in (shape, filter_))
    want = expected(x, w, stride, dilation, padding, fill)
    columns = w.shape[3]
    packed = (-(-columns // 32), (w.size // columns + 4) * 32)
    options = {"machine": machine, "workers": workers}
    (strips,) = run("mok.pack_int8_filter", [w], [(I8, packed)], {}, **options)
    attributes = {
        "stride": stride, "dilation": dilation, "padding": padding, "groups": 1, "fill": fill,
        "taps": w.shape[:2], "columns": columns,
    }  # fmt: skip
    result = [(np.dtype(np.int32), want.shape)]
    (got,) = run("mok.int8_conv", [x, strips], result, attributes, **options)
    np.testing.assert_array_equal(got, want)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_random(data: st.DataObject) -> None:
    def pair(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    taps, dilation, stride = pair(1, 4), pair(1, 2), pair(1, 3)
    spans = [(t - 1) * d + 1 for t, d in zip(taps, dilation, strict=True)]
    # no window of padding only
    padding = tuple(data.draw(st.integers(0, min(2, spans[i // 2] - 1))) for i in range(4))
    sizes = [
        max(1, span - padding[2 * i] - padding[2 * i + 1]) + data.draw(st.integers(0, 9))
        for i, span in enumerate(spans)
    ]
    channels = data.draw(st.sampled_from((4, 12, 64, 192, 200)))
    check(
        (data.draw(st.integers(1, 2)), *sizes, channels),
        (*taps, channels, data.draw(st.sampled_from((1, 31, 32, 70)))),
        stride, dilation, padding, data.draw(st.integers(-128, 127)),
        data.draw(st.sampled_from(("host", "avx2"))), data.draw(st.integers(1, 2)),
    )  # fmt: skip


@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
@pytest.mark.parametrize("channels", [8, 192])
def test_several_blocks(channels: int, machine: str) -> None:
    """Patches longer than a K block, from a padded copy and in place; tiles of all heights."""
    padding = (1, 2, 0, 1)
    for size in (5, 7):
        check((1, size, 9, channels), (3, 3, channels, 40), (1, 1), (1, 2), padding, -7, machine, 2)


def test_extreme_codes() -> None:
    """The products of -128, which has no magnitude of 8 bits, are exact."""
    x, w = np.full((1, 3, 3, 4), -128, np.int8), np.full((2, 2, 4, 3), -128, np.int8)
    (strips,) = run("mok.pack_int8_filter", [w], [(I8, (1, 20 * 32))], {})
    attributes = {
        "stride": (1, 1), "dilation": (1, 1), "padding": (1, 0, 0, 1), "groups": 1, "fill": -128,
        "taps": (2, 2), "columns": 3,
    }  # fmt: skip
    (got,) = run("mok.int8_conv", [x, strips], [(np.dtype(np.int32), (1, 3, 3, 3))], attributes)
    assert (got == 16 * 128 * 128).all()
