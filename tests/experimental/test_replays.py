"""Calls that leave a trace late: at the same lines, with the same arguments, they are other calls or ask for others."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from max.experimental import Tensor, _replays
from max.experimental import functional as F

RNG = np.random.default_rng(8)


def array(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def same(got: Tensor, want: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(got.to_numpy(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_another_op_on_the_same_operands(position: int) -> None:
    for turn in range(12):
        a = array(3, 4)
        ops: list[tuple[Any, Any]] = [(F.tanh, np.tanh)] * 3
        if turn in (7, 8, 11):
            ops[position] = (F.sin, np.sin)
        x, want = Tensor.constant(a), a
        for ours, numpys in ops:
            x, want = ours(x), numpys(want)
        same(x, want)


@pytest.mark.parametrize("usual", ["one", "both", "first", "second"])
def test_a_write_asks_for_all_that_reads_the_tensor(usual: str) -> None:
    """A write computes the values that read the tensor, and only those: others than the trace ends with."""
    for turn in range(24):
        a, b = array(4), array(4)
        x, y = Tensor.constant(a).realize, Tensor.constant(b).realize
        both = x + y
        left = x * 2
        right = y * 3
        ends = usual if turn % 6 < 4 else ("one", "both", "first", "second")[turn // 6]
        if ends == "one":
            _ = left.realize
        if ends in ("first", "both"):
            x[...] = 7.0
        if ends in ("second", "both"):
            y[...] = 5.0
        same(both, a + b)
        same(left, a * 2)
        same(right, b * 3)
    del both, left, right
    assert not _replays._replays


def test_a_call_that_was_made_elsewhere_first_is_recorded_at_its_own_line() -> None:
    """A stretch whose end was followed from another line is recorded with that line."""
    table = Tensor.constant(array(4, 2))

    def picked(rows: Any, turn: int) -> Tensor:
        if turn % 2:
            return F.gather(table, rows, axis=0) + 1
        return F.gather(table, rows, axis=0) + 1

    lines: set[str] = set()
    for turn in range(12):
        z = picked(Tensor.from_dlpack(np.int64([1 if turn < 8 else 9])), turn)
        if turn < 8:
            same(z, table.to_numpy()[1:2] + 1)
            continue
        with pytest.raises(IndexError) as error:
            _ = z.realize
        lines.add(str(error.value))
        # no later test computes it
        del z, error
        gc.collect()
    first = picked.__code__.co_firstlineno
    assert len(lines) == 2
    assert all(any(f"{__file__}:{first + n}" in text for text in lines) for n in (2, 3)), lines
