"""Which loops poll for interrupts: those that may take long."""

from __future__ import annotations

from typing import Any

import pytest

from max import kernel as k
from max.kernel.frontend.builder import Builder
from max.kernel.frontend.division import most_iterations
from max.kernel.ir.nodes import Atom
from max.kernel.types import INDEX, scalar

PART = 1 << 16
"""The iterations of an innermost loop between two polls."""


@k.kernel
def counts(out: k.Output[k.i64, 1], n: k.i64, *, most=None, step=1):
    stop = n if most is None else min(n, most)
    for i in range(0, stop, step):
        out[0] = out[0] + i


@k.kernel
def falls(out: k.Output[k.i64, 1], n: k.i64, *, most=None, step=1):
    start = n if most is None else min(n, most)
    for i in range(start, 0, -step):
        out[0] = out[0] + i


@k.kernel
def vectors(out: k.Output[k.f32, 1], n: k.i64, *, most=None, step=1):
    stop = n if most is None else min(n, most)
    for i, mask in k.vectors(stop, step):
        out.store(i, value=out.load(i, width=step, mask=mask), mask=mask)


@pytest.mark.plain_code
@pytest.mark.parametrize(
    ("most", "step", "polls"),
    [
        (None, 1, True),
        (None, 16, True),
        (PART, 1, False),
        (PART + 1, 1, True),
        (PART * 16, 16, False),
        ((PART + 1) * 16, 16, True),
    ],
)
@pytest.mark.parametrize("kernel", [counts, falls, vectors], ids=str)
def test_short_loops_do_not_poll(
    kernel: k.Kernel, most: int | None, step: int, polls: bool
) -> None:
    dtype = k.f32 if kernel is vectors else k.i64
    target = k.host_target()
    params: dict[str, Any] = {"most": most, "step": step}
    ir = k.specialize(kernel, [k.TensorSpec(dtype, (None,)), k.i64], params, target)
    assert ("load volatile i64" in k.emit_llvm(ir, target)) == polls


@pytest.mark.parametrize("step", [-7, -2, -1, 1, 2, 7])
def test_iterations_of_constant_loops(step: int) -> None:
    b = Builder()
    for start in range(-9, 10):
        for stop in range(-9, 10):
            bounds: tuple[Atom, Atom] = b.const(start, INDEX), b.const(stop, INDEX)
            assert most_iterations(b, *bounds, step) == len(range(start, stop, step))


def test_constants_that_print_alike_are_one() -> None:
    b = Builder()
    floats = scalar(k.f32)
    values = [1, True, 1.0, 0.0, -0.0, (1, 0), (True, False), (1.0, 0.0), (1.0, -0.0), ()]
    constants = [b.const(value, floats) for value in values]
    assert len(set(map(id, constants))) == len(values)
    assert all(b.const(value, floats) is c for value, c in zip(values, constants, strict=True))
    assert b.const(1, INDEX) is not constants[0]
