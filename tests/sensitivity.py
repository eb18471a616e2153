"""How far the outputs of a graph may be from the interpreter's: found by interpreting it again with rounding errors put
in.

A correct float32 evaluation may add in another order and use another `tanh`, so each op is off by some units in the
last place (ulps). What that does to an output depends on the graph: a chain may amplify an error, and a difference of
equal values consists of errors only. So the bound is measured, element by element: the interpreter runs `SAMPLES` more
times, where each element of each input and result is off by up to `ULPS` ulps at random, and the engine may be `FACTOR`
times as far away as these runs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from max import _interpreter
from max._interpreter.core import Frame

SAMPLES = 4
ULPS = 4
FACTOR = 8.0
# results are elements of the operands, so nothing is rounded
EXACT = frozenset(
    f"mo.{name}"
    for name in (
        "abs", "broadcast_to", "concat", "constant", "gather", "max", "min", "neg", "pad", "reduce_max", "reduce_min",
        "relu", "reshape", "select", "slice", "transpose",
    )
)  # fmt: skip


def _perturbed(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if array.dtype != np.float32:
        return array
    off = rng.uniform(-ULPS, ULPS, array.shape).astype(np.float32) * np.finfo(np.float32).eps
    return (array * (1 + off)).astype(np.float32)


def interpret(graph: Any, arrays: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The interpreter's outputs, each with its bound: the largest difference that rounding explains, an array of its
    shape.
    """
    expected = _interpreter.run(graph, [array.copy() for array in arrays])
    differences: list[list[np.ndarray]] = [[] for _ in expected]
    finish = Frame._finish
    for seed in range(SAMPLES):
        rng = np.random.default_rng(seed)

        def finish_perturbed(frame, op, array, type_, rng=rng):
            result = finish(frame, op, array, type_)
            return result if op.name in EXACT else _perturbed(result, rng)

        with mock.patch.object(Frame, "_finish", finish_perturbed):
            outputs = _interpreter.run(graph, [_perturbed(array, rng) for array in arrays])
        for seen, output, value in zip(differences, outputs, expected, strict=True):
            with np.errstate(invalid="ignore"):
                seen.append(np.abs(output.astype(np.float64) - value.astype(np.float64)))
    return [
        (value, _bound(np.stack(seen), value))
        for value, seen in zip(expected, differences, strict=True)
    ]


def _bound(differences: np.ndarray, expected: np.ndarray) -> np.ndarray:
    finite = np.nan_to_num(differences, nan=0.0, posinf=0.0)
    # an element that the samples leave alone by chance is as uncertain as its neighbors
    typical = float(np.sqrt(np.mean(finite * finite))) if finite.size else 0.0
    last_bit = np.abs(expected.astype(np.float64)) * np.finfo(np.float32).eps
    return FACTOR * (finite.max(0) + typical / 4 + last_bit * 0.5)


def assert_within(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    """Compares an output with the interpreter's; NaN and infinities must stand at the same places."""
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.where(finite, 0, actual), np.where(finite, 0, expected))
    far = finite & ~(np.abs(actual.astype(np.float64) - expected.astype(np.float64)) <= bound)
    if far.any():
        where = tuple(int(i) for i in np.argwhere(far)[0])
        raise AssertionError(
            f"{int(far.sum())} of {far.size} elements are wrong, the first at {list(where)}: "
            f"{actual[where]}, expected {expected[where]} within {bound[where]:.3g}"
        )
