"""Functions on eager tensors: each case of the table of ops, and random programs, against NumPy."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from max.experimental import Tensor
from max.experimental import functional as F
from max.experimental.programs.programs import compiled_programs
from max.graph import ops
from tests.ops.table import CASES, OpCase, compare, inputs_of


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ops(case: OpCase) -> None:
    rng = np.random.default_rng(int(hashlib.sha256(case.name.encode()).hexdigest()[:8], 16))
    dtype = "float32" if "float32" in case.dtypes else case.dtypes[0]
    op = F.functional(case.build)
    # from the third sizes on the call is staged with symbolic sizes if possible
    for _ in range(4):
        inputs = inputs_of(case, dtype, rng)
        results = op(*[Tensor.from_dlpack(x) for x in inputs])
        results = [results] if isinstance(results, Tensor) else results
        compare(case, dtype, inputs, [result.to_numpy() for result in results])


def test_all_documented_functions_exist() -> None:
    functions = [name for name in F.__all__ if name not in ("functional", "allreduce_sum")]
    assert all(callable(getattr(F, name)) for name in functions)
    # all ops of the graph API except those without a meaning for eager tensors
    absent = set(ops.__all__) - set(F.__all__)
    assert absent == {
        "Callable", "DeviceRef", "InterpolationMode", "TensorType", "allreduce", "assert_same_device", "buffer_create",
        "buffer_load", "call", "parallel", "quantize", "random", "shard_and_stack",
    }  # fmt: skip


UNARY = [
    (F.tanh, np.tanh),
    (F.abs, np.abs),
    (F.negate, np.negative),
    (F.relu, lambda x: np.maximum(x, 0)),
]
BINARY = [(F.add, np.add), (F.sub, np.subtract), (F.mul, np.multiply), (F.max, np.maximum)]


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int) -> None:
    """A program of random calls, with varying sizes and numbers, that realizes some intermediate tensors."""
    plan = np.random.default_rng(seed)
    steps = []
    for position in range(12):
        kind = plan.choice(
            [
                "unary",
                "binary",
                "number",
                "row",
                "mean",
                "flip",
                "slice",
                "join",
                "realize",
                "forget",
            ]
        )
        steps.append(
            (
                kind,
                int(plan.integers(0, 4)),
                int(plan.integers(0, position + 2)),
                int(plan.integers(0, position + 2)),
            )
        )
    before = compiled_programs()
    for run in range(8):
        rng = np.random.default_rng(100 * seed + run)
        rows, columns, rate = int(rng.integers(2, 9)), 5, float(rng.uniform(0.5, 2))
        arrays = [rng.standard_normal((rows, columns)).astype(np.float32) for _ in range(2)]
        tensors: list[Tensor | None] = [Tensor.from_dlpack(a) for a in arrays]
        for kind, which, i, j in steps:
            x, a = tensors[i % len(tensors)], arrays[i % len(arrays)]
            y, b = tensors[j % len(tensors)], arrays[j % len(arrays)]
            if x is None or y is None:
                continue
            if kind == "unary":
                made, expected = UNARY[which][0](x), UNARY[which][1](a)
            elif kind == "binary":
                made, expected = BINARY[which][0](x, y), BINARY[which][1](a, b)
            elif kind == "number":
                made, expected = x * rate, a * np.float32(rate)
            elif kind == "row":
                made, expected = x - x[which % 2], a - a[which % 2]
            elif kind == "mean":
                made, expected = x - x.mean(0), a - a.mean(0, keepdims=True)
            elif kind == "flip":
                made, expected = x.reshape((columns, rows)).T, a.reshape(columns, rows).T
                made, expected = made + y, expected + b
            elif kind == "slice":
                made = F.concat([x[: rows - 1], y[rows - 1 :]], axis=0)
                expected = np.concatenate([a[: rows - 1], b[rows - 1 :]])
            elif kind == "join":
                both = F.concat([x, y], axis=0)
                made, expected = F.split(both, [rows, rows], 0)[which % 2], [a, b][which % 2]
            elif kind == "realize":
                _ = x.realize
                continue
            else:
                tensors[i % len(tensors)] = None
                continue
            tensors.append(made)
            arrays.append(expected.astype(np.float32))
        for tensor, expected in zip(tensors, arrays, strict=True):
            if tensor is not None:
                np.testing.assert_allclose(tensor.to_numpy(), expected, rtol=1e-4, atol=1e-4)
    # a program for each of the first sizes, and one with symbols for all others
    assert compiled_programs() - before <= 60


def test_names_of_later_releases() -> None:
    array = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    x, y = Tensor.from_dlpack(array), Tensor.from_dlpack(array[::-1].copy())
    for result, expected in (
        (F.full((2, 3), 2.5), np.full((2, 3), 2.5)),
        (F.full_like(x, 2), np.full((3, 5), 2)),
        (F.zeros_like(x.type), np.zeros((3, 5))),
        (F.ones_like(x), np.ones((3, 5))),
        (F.elementwise_max(x, y), np.maximum(array, array[::-1])),
        (F.elementwise_min(x, 0.25), np.minimum(array, np.float32(0.25))),
        (F.clip(x, -0.5, 0.5), array.clip(-0.5, 0.5)),
        (F.clamp(x, y, 1.0), np.minimum(np.maximum(array, array[::-1]), 1)),
        (x.clip(min=-0.25), array.clip(min=-0.25)),
        (x.clip(max=0.25), array.clip(max=0.25)),
    ):
        np.testing.assert_array_equal(result.to_numpy(), expected.astype(np.float32))
