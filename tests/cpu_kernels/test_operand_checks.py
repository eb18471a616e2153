"""Checks that kernels share: each wrong size or offset is an error that names it, and nothing else is one."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import (
    check_offsets,
    check_rising,
    check_size,
)
from tests.kernel_language.harness import compiled


@k.kernel
def checked_offsets(out: k.Output, offsets: k.Input, rows: k.i64, *, width: int):  # pyright: ignore
    check_offsets("starts", offsets, rows, width)
    out[0] = 1.0


@k.kernel
def checked_rising(out: k.Output, offsets: k.Input, rows: k.i64, *, width: int):  # pyright: ignore
    check_rising("starts", offsets, width)
    out[0] = 1.0


@k.kernel
def checked_size(out: k.Output, x: k.Input, rows: k.i64):  # pyright: ignore
    check_size("x", x.shape[0], rows)
    out[0] = 1.0


def fall(offsets: np.ndarray) -> str | None:
    """The error of the first offset that falls."""
    for at in range(1, len(offsets)):
        if offsets[at] < offsets[at - 1]:
            return (
                f"starts[{at}] is {offsets[at]}, expected {offsets[at - 1]} or more, the one before"
            )
    return None


def wrong(offsets: np.ndarray, rows: int) -> str | None:
    """The error that offsets get, by the documentation of `check_offsets`."""
    if not len(offsets):
        return f"starts is empty, expected the first row of each sequence and {rows}"
    if offsets[0] != 0:
        return f"starts[0] is {offsets[0]}, expected 0"
    if offsets[-1] != rows:
        last = len(offsets) - 1
        return f"starts[{last}] is {offsets[-1]}, expected {rows}, the number of rows"
    return fall(offsets)


def run(kernel: k.Kernel, x: np.ndarray, rows: int, error: str | None, **params: int) -> None:
    out = np.zeros(1, np.float32)
    if error is None:
        compiled(kernel, [out, x, np.int64(rows)], params)
        assert out[0] == 1
    else:
        with pytest.raises(ValueError, match=re.escape(error) + "$"):
            compiled(kernel, [out, x, np.int64(rows)], params)
        assert out[0] == 0


@st.composite
def offsets_and_rows(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    lengths = draw(st.lists(st.integers(0, 3), max_size=19))
    offsets = np.cumsum([0, *lengths]).astype(draw(st.sampled_from([np.uint32, np.uint8])))
    rows = int(offsets[-1])
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(offsets) - 1))
        offsets[at] = draw(st.integers(0, 60))
    if draw(st.booleans()):
        rows = int(offsets[-1])
    return offsets[: None if draw(st.integers(0, 9)) else 0], rows


@settings(max_examples=60, deadline=None)
@given(offsets_and_rows(), st.sampled_from([4, 8]))
def test_offsets(case: tuple[np.ndarray, int], width: int) -> None:
    offsets, rows = case
    run(checked_offsets, offsets, rows, wrong(offsets, rows), width=width)
    if len(offsets):
        run(checked_rising, offsets, rows, fall(offsets), width=width)


@pytest.mark.parametrize("numbers", [[], [0], [1], [0, 0], [1, 1], [0, 1]])
@pytest.mark.parametrize("rows", [0, 1])
def test_offsets_of_few_sequences(numbers: list[int], rows: int) -> None:
    offsets = np.array(numbers, np.uint32)
    run(checked_offsets, offsets, rows, wrong(offsets, rows), width=4)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("width", [1, 4])
def test_the_offset_that_falls_is_named(count: int, width: int) -> None:
    """Each place of the last vector and of the tail, and behind the last offset no element is read."""
    for at in range(count + 1):
        memory = np.zeros(count + 9, np.uint32)
        offsets = memory[: count + 1]
        offsets[:] = np.arange(2, count + 3) // 2  # two by two equal
        if at:
            offsets[at] = offsets[at - 1] - 1
        run(checked_rising, offsets, 0, fall(offsets), width=width)


def test_sizes() -> None:
    for size, rows in ((3, 3), (3, 4), (4, 3), (0, 0), (0, 1)):
        error = None if size == rows else f"x has size {size}, expected {rows}"
        run(checked_size, np.zeros(size, np.float32), rows, error)
