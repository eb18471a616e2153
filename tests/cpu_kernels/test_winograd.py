"""Convolutions by Winograd's algorithm against torch in float64: random shapes, edges, the size of the error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from max._backends.cpu.kernels.convolution.winograd import MAX_CHANNELS, PRODUCTS
from max._backends.program import KernelRunError
from tests.cpu_kernels.harness import run

EPSILON = float(np.finfo(np.float32).eps)
F32 = np.dtype(np.float32)
Padding = tuple[int, int, int, int]
Dilation = tuple[int, int]


def convolve(
    x: np.ndarray, w: np.ndarray, padding: Padding, dilation: Dilation = (1, 1), **options: Any
) -> np.ndarray:
    """The result of the kernels."""
    n, high, wide, channels = x.shape
    columns = w.shape[-1]
    packed = [(F32, (-(-columns // 32), PRODUCTS * channels * 32))]
    (filters,) = run("mok.winograd_filter", [w], packed, {}, **options)
    high += padding[0] + padding[1] - 2 * dilation[0]
    wide += padding[2] + padding[3] - 2 * dilation[1]
    shape = (n, high, wide, columns)
    steps = {
        "stride": (1, 1),
        "dilation": dilation,
        "groups": 1,
        "taps": (3, 3),
        "columns": columns,
    }
    attributes = {**steps, "padding": padding}
    (result,) = run("mok.winograd_conv", [x, filters], [(F32, shape)], attributes, **options)
    return result


def expected(
    x: np.ndarray, w: np.ndarray, padding: Padding, dilation: Dilation = (1, 1)
) -> np.ndarray:
    """The convolution in float64."""
    a = torch.from_numpy(x.astype(np.float64)).movedim(-1, 1)
    a = torch.nn.functional.pad(a, (padding[2], padding[3], padding[0], padding[1]))
    b = torch.from_numpy(w.astype(np.float64)).movedim((-1, -2), (0, 1))
    return torch.nn.functional.conv2d(a, b, dilation=dilation).movedim(1, -1).numpy()


def operands(x: tuple[int, ...], columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((3, 3, x[-1], columns), np.float32)
    return rng.standard_normal(x, np.float32), w


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(3, 22), st.integers(3, 22)),
    channels=st.sampled_from((1, 5, 16, 33, 72)),
    columns=st.sampled_from((1, 7, 32, 45)),
    # each padding of each machine has a kernel of its own
    where=st.sampled_from((((1, 1, 1, 1), "host"), ((0, 3, 2, 1), "avx2"))),
    workers=st.sampled_from((1, 2)),
)
def test_random(
    sizes: tuple[int, int, int],
    channels: int,
    columns: int,
    where: tuple[Padding, str],
    workers: int,
) -> None:
    padding, machine = where
    x, w = operands((*sizes, channels), columns)
    want = expected(x, w, padding)
    got = convolve(x, w, padding, machine=machine, workers=workers)
    # sums of 9 · C products of numbers of size 1
    np.testing.assert_allclose(got, want, rtol=0, atol=100 * EPSILON * np.sqrt(9 * channels))


@pytest.mark.parametrize(("channels", "bound"), [(128, 12), (512, 24), (MAX_CHANNELS, 33)])
def test_error(channels: int, bound: int) -> None:
    """The error of many channels, in units of the results' root mean square: that of a sum of products is half of it.

    At the points 0, ±1, ±2 and ∞ it would be 18 instead of 9 with 128 channels.
    """
    x, w = operands((1, 24, 24, channels), 32)
    want = expected(x, w, (1, 1, 1, 1))
    error, size = convolve(x, w, (1, 1, 1, 1)) - want, np.sqrt(np.mean(want**2))
    assert np.sqrt(np.mean(error**2)) < bound * EPSILON * size
    assert abs(error).max() < 9 * bound * EPSILON * size


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("image", [(1, 14, 14), (3, 20, 17), (2, 41, 38)])
def test_tasks(image: tuple[int, int, int], workers: int) -> None:
    """One block of tiles and several, whose strips workers share; channels whose input exceeds the L2 cache."""
    x, w = operands((*image, 300), 100)
    want = expected(x, w, (1, 1, 1, 1))
    got = convolve(x, w, (1, 1, 1, 1), workers=workers)
    # a wrong tile or strip differs by the size of the results, 50
    np.testing.assert_allclose(got, want, rtol=0, atol=200 * EPSILON * np.sqrt(2700))


def test_edges() -> None:
    """A pixel changes the positions whose taps read it, and no others: all positions of a tile and of its neighbors."""
    for row, column in ((0, 0), (5, 6), (9, 10)):
        x = np.zeros((1, 10, 11, 32), np.float32)
        x[0, row, column, 3] = 1
        w = operands((1, 1, 1, 32), 32)[1]
        want = expected(x, w, (1, 1, 1, 1))
        np.testing.assert_allclose(convolve(x, w, (1, 1, 1, 1)), want, atol=20 * EPSILON)


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(7, 31), st.integers(7, 31)),
    channels=st.sampled_from((1, 16, 33)),
    columns=st.sampled_from((7, 45)),
    # images of every third line that are empty, shorter and longer than a tile
    where=st.sampled_from(
        (((2, 2, 2, 2), (2, 2), "host"), ((3, 1, 0, 13), (3, 7), "avx2"), ((9, 9, 1, 1), (9, 1), "host"))
    ),
    workers=st.sampled_from((1, 2)),
)  # fmt: skip
def test_dilated(
    sizes: tuple[int, int, int],
    channels: int,
    columns: int,
    where: tuple[Padding, Dilation, str],
    workers: int,
) -> None:
    padding, dilation, machine = where
    x, w = operands((*sizes, channels), columns)
    want = expected(x, w, padding, dilation)
    got = convolve(x, w, padding, dilation, machine=machine, workers=workers)
    np.testing.assert_allclose(got, want, rtol=0, atol=100 * EPSILON * np.sqrt(9 * channels))


@pytest.mark.parametrize(("channels", "bound"), [(128, 12), (512, 24)])
def test_error_of_dilated(channels: int, bound: int) -> None:
    """As without a dilation: the sums are those of the images of every fourth pixel."""
    x, w = operands((1, 33, 30, channels), 32)
    padding, dilation = (4, 4, 4, 4), (4, 4)
    want = expected(x, w, padding, dilation)
    error, size = convolve(x, w, padding, dilation) - want, np.sqrt(np.mean(want**2))
    assert np.sqrt(np.mean(error**2)) < bound * EPSILON * size
    assert abs(error).max() < 9 * bound * EPSILON * size


def test_too_many_channels() -> None:
    x, w = operands((1, 4, 4, MAX_CHANNELS + 1), 1)
    with pytest.raises(
        KernelRunError, match=f"{MAX_CHANNELS + 1} channels, at most {MAX_CHANNELS}"
    ):
        convolve(x, w, (1, 1, 1, 1))
