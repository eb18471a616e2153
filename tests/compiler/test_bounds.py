"""Bounds of values in regions: they hold all elements that the interpreter computes, and are no wider than needed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from max import _interpreter, mlir
from max._backends.cpu.backend import cpu_backends
from max._compiler.analysis.bounds import MOST_ELEMENTS, Bounds, integer_range
from max._compiler.mok import RegionOp
from max._compiler.pipeline import optimize
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

DEVICE = DeviceRef.CPU()
F32, I8, I32 = DType.float32, DType.int8, DType.int32
CODES = np.arange(-128, 128).astype(np.int8)
COLUMN = np.linspace(-3, 5, 256).astype(np.float32)


def bounds_of(build: Callable[[TensorValue], TensorValue]) -> tuple[float, float] | None:
    """The bounds of a function of all signed bytes; they hold what the interpreter computes."""
    with Graph("bounds", input_types=[TensorType(I8, [256], DEVICE)]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    with np.errstate(all="ignore"):
        (result,) = _interpreter.run(graph, [CODES])
    module = graph.to_mlir()
    optimize(module, cpu_backends(), last="fuse")
    region = next(op for op in mlir.entry(module).block.ops if isinstance(op, RegionOp))
    found = Bounds(region).of(region.results_in_body[0])
    if found is not None:
        assert found[0] <= result.min() and result.max() <= found[1]
    return found


def number(x: float) -> TensorValue:
    return ops.constant(x, F32, DEVICE)


def wide(x: TensorValue) -> TensorValue:
    return ops.cast(x, F32)


def column(factor: float = 1, more: float = 0) -> TensorValue:
    return ops.constant(COLUMN * np.float32(factor) + np.float32(more), F32, DEVICE)


def clip(x: TensorValue, low: float, high: float) -> TensorValue:
    return ops.min(ops.max(x, number(low)), number(high))


CASES: dict[str, tuple[Callable[[TensorValue], TensorValue], tuple[float, float]]] = {
    "cast": (wide, (-128, 127)),
    "add": (lambda x: wide(x) + column(), (-131, 132)),
    "sub": (lambda x: wide(x) - column(), (-133, 130)),
    "mul": (lambda x: wide(x) * column(), (-640, 635)),
    "negative": (lambda x: wide(x) * -2.0, (-254, 256)),
    "div": (lambda x: wide(x) / number(-0.5), (-254, 256)),
    "max": (lambda x: ops.max(wide(x), column()), (-3, 127)),
    "min": (lambda x: ops.min(wide(x), column()), (-128, 5)),
    "max with more": (lambda x: ops.max(wide(x), column(60)), (-128, 300)),
    "min with less": (lambda x: ops.min(wide(x), column(60)), (-180, 127)),
    "where not": (lambda x: ops.where(x > 3, wide(x), column(60)), (-180, 300)),
    "div by several": (lambda x: clip(wide(x), 5, 10) / column(1, 3.5), (5 / 8.5, 20)),
    "clip": (lambda x: clip(wide(x), -7, 9), (-7, 9)),
    "round": (lambda x: ops.round(wide(x) * 0.3), (-39, 39)),
    "where": (lambda x: ops.where(x > 3, wide(x) * 3.0, column()), (-384, 381)),
    "bool": (lambda x: ops.cast(x > 3, F32) * 1.5, (0, 1.5)),
    "sum of integers": (lambda x: ops.cast(ops.cast(x, I32) - 200, F32) * 1.0, (-328, -73)),
    "wraps above": (lambda x: wide(x + 100), (-128, 127)),
    "wraps below": (lambda x: wide(x - 100), (-128, 127)),
    "from the least": (lambda x: wide(ops.min(x, ops.constant(9, I8, DEVICE))), (-128, 9)),
    "to the greatest": (lambda x: wide(ops.max(x, ops.constant(-7, I8, DEVICE))), (-7, 127)),
    "integers that wrap": (lambda x: wide(x + x), (-128, 127)),
    "cut": (lambda x: ops.cast(ops.cast(wide(x) * 0.3, I8), F32), (-39, 39)),
    "saturated": (lambda x: ops.cast(ops.cast(wide(x) * 3.0, I8), F32), (-128, 127)),
    "unsigned": (lambda x: ops.cast(ops.cast(x, DType.uint8), F32), (0, 255)),
}


@pytest.mark.parametrize("name", CASES)
def test_bounds(name: str) -> None:
    build, (low, high) = CASES[name]
    found = bounds_of(build)
    assert found is not None
    np.testing.assert_allclose(found, (low, high), rtol=1e-5)
    if name == "clip":
        assert found == (low, high)
    # what rounds makes them wider
    if name in ("add", "sub", "mul", "negative", "div", "bool"):
        assert found[0] < low or low == 0
        assert found[1] > high


UNKNOWN: dict[str, Callable[[TensorValue], TensorValue]] = {
    "function": lambda x: ops.exp(wide(x)),
    "part": lambda x: wide(x) + ops.exp(wide(x)),
    "by zero": lambda x: number(1.0) / wide(x),
    "up to zero": lambda x: number(1.0) / ops.max(wide(x), number(0.0)),
    "from zero": lambda x: number(1.0) / ops.min(wide(x), number(0.0)),
    "large": lambda x: wide(x) * 1e29,
    "large below": lambda x: ops.min(wide(x), number(-1e31)),
    "large above": lambda x: ops.max(wide(x), number(1e31)),
    "nan": lambda x: ops.max(wide(x), number(float("nan"))),
    "less than infinity": lambda x: ops.min(wide(x), number(float("inf"))),
    "more than -infinity": lambda x: ops.max(wide(x), number(float("-inf"))),
    "infinite": lambda x: wide(x) * float("inf"),
    "narrow": lambda x: ops.cast(x, DType.float16) + ops.cast(x, DType.float16),
    "double": lambda x: ops.cast(x, DType.float64) + 1.0,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_unknown(name: str) -> None:
    assert bounds_of(UNKNOWN[name]) is None


def test_large_numbers_are_followed() -> None:
    found = bounds_of(lambda x: ops.max(wide(x), number(2.0**100)))
    assert found == (2.0**100, 2.0**100)


@pytest.mark.parametrize(
    ("size", "is_read"), [(0, 0), (1, 1), (MOST_ELEMENTS, 1), (MOST_ELEMENTS + 1, 0)]
)
def test_large_constants_are_not_read(size: int, is_read: int) -> None:
    """Nor empty ones, which have no least element."""
    with Graph("large", input_types=[TensorType(I8, [size], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(wide(x) * ops.constant(np.linspace(0, 2, size, dtype=np.float32), F32, DEVICE))
    module = graph.to_mlir()
    optimize(module, cpu_backends(), last="fuse")
    region = next(op for op in mlir.entry(module).block.ops if isinstance(op, RegionOp))
    assert (Bounds(region).of(region.results_in_body[0]) is None) == (not is_read)


def test_ranges_of_types() -> None:
    assert integer_range(DType.bool) == (0, 1)
    assert integer_range(I8) == (-128, 127)
    assert integer_range(DType.uint16) == (0, 65535)
    assert integer_range(F32) is None
