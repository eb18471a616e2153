"""Random eager programs have NumPy's values, see `tests.experimental.eager_programs`; and what they found."""

from __future__ import annotations

import array
import collections
import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from max import driver
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import Tensor, random
from max.experimental import functional as F
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.experimental.eager_programs import (
    REPETITIONS,
    World,
    drawn,
    pack_soon,
    run,
    samples,
)


def test_random_tensors_eager_followed_and_in_a_graph(rng: np.random.Generator) -> None:
    world, a = World(rng), np.zeros((150, 20), np.float32)
    world.seed = 5
    random.set_seed(5)
    like, results = Tensor.constant(a), list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]()
    for _ in range(8):
        # a sum with something else, so that it is part of a program
        uniform = drawn(world, "uniform", like, -1.0, 3.0)
        want = samples(world, "uniform", a, -1.0, 3.0)
        normal = drawn(world, "gaussian", like, 2.0, 0.5) + 1.0
        results.append(((normal - 1.0).to_numpy(), samples(world, "gaussian", a, 2.0, 0.5)))
        results.append((uniform.to_numpy(), want))
    for got, want in results:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)
    with Graph("last", input_types=[]) as graph:
        ops.random.set_seed((5 << 32) + world.draws - 1)
        graph.output(
            ops.random.gaussian(TensorType(DType.float32, a.shape, DeviceRef.CPU()), 2.0, 0.5)
        )
    (compiled,) = InferenceSession(devices=[CPU()]).load(graph).execute()
    np.testing.assert_allclose(compiled.to_numpy(), results[-2][0], rtol=1e-5, atol=2e-5)
    # Kolmogorov and Smirnov: the greatest distance of the distribution functions, at a level of 1e-6
    for distribution, numbers in (
        (lambda x: (x + 1) / 4, results[1::2]),
        (np.vectorize(lambda x: 0.5 * (1 + math.erf((x - 2) / 0.5 / math.sqrt(2)))), results[::2]),
    ):
        x = np.sort(np.concatenate([got.ravel() for got, _ in numbers]))
        distance = np.abs(distribution(x) - (np.arange(x.size) + 0.5) / x.size).max()
        assert distance < 2.7 / math.sqrt(x.size)


def of(*values: float) -> Tensor:
    return Tensor.constant(np.array(values, np.float32))


def runs(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_soon(monkeypatch)
    counts = Counter[str]()
    for seed in seeds:
        counts += run(seed)
    assert counts["whole"] > 0.7 * REPETITIONS * len(seeds), counts
    assert counts["compared"] > 50 * len(seeds), counts


def test_random_programs_have_the_values_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(range(6), monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 2100, 100))
def test_many_random_programs(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(range(first, first + 100), monkeypatch)


def test_an_array_may_be_written_before_the_call_runs() -> None:
    x, operand = of(1, 2, 3), np.array([1, 2, 3], np.float32)
    y = x + operand
    operand[:] = 50
    np.testing.assert_array_equal(y.to_numpy(), [2, 4, 6])
    # the program of `y` is kept by the content that the array had
    for values in ([1, 2, 3], [50, 50, 50]):
        other = x + np.array(values, np.float32)
        np.testing.assert_array_equal(
            other.to_numpy(), np.array([1, 2, 3], np.float32) + np.array(values, np.float32)
        )


OPERANDS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.array([1, 2, 3], np.float32),
    "torch": lambda: torch.tensor([1.0, 2.0, 3.0]),
    "driver": lambda: driver.Tensor.from_numpy(np.array([1, 2, 3], np.float32)),
    "array": lambda: array.array("f", [1, 2, 3]),
    "bytearray": lambda: bytearray([1, 2, 3]),
    "deque": lambda: collections.deque([1.0, 2.0, 3.0]),
    "UserList": lambda: collections.UserList([1.0, 2.0, 3.0]),
    "list": lambda: [1.0, 2.0, 3.0],
}


@pytest.mark.parametrize("kind", OPERANDS)
def test_operands_that_are_written_between_runs(kind: str) -> None:
    operand, x = OPERANDS[kind](), of(1, 2, 3)
    for turn in range(6):
        got = (x * 2 + operand).to_numpy()
        np.testing.assert_array_equal(got, [3 + turn, 6, 9])
        operand[0] = turn + 2


def test_arrays_of_two_dtypes_with_the_same_bytes() -> None:
    x, content = of(1, 2), np.array([0x40, 0x41], np.uint8)
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2) * 2:
        operand = content.view(dtype)
        got = F.where(x > 0, operand, operand).cast(DType.float32)
        np.testing.assert_array_equal(got.to_numpy(), operand.astype(np.float32))


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "Tensor": Tensor,
    "dtype": lambda y: Tensor(y, dtype=DType.float64),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_that_outlives_its_tensor_has_the_elements_before_a_write(kind: str) -> None:
    for _ in range(6):
        x = of(1, 2, 3)
        y = x * 2
        z = COPIES[kind](y)
        del y
        x[0] = 100
        np.testing.assert_array_equal(z.to_numpy(), [2, 4, 6])


def test_a_copy_is_on_the_same_memory() -> None:
    x = of(1, 2, 3)
    y = copy.copy(x * 1)
    z = copy.copy(y)
    z[0] = 7
    np.testing.assert_array_equal(y.to_numpy(), [7, 2, 3])


def test_a_slice_that_is_empty_where_bounds_vary() -> None:
    a = np.ones((4, 3), np.float32)
    for stop in (2, 3, 4, 1, 0, 3, 0):
        x = Tensor.constant(a)
        np.testing.assert_array_equal((x * 2)[1:stop].to_numpy(), (a * 2)[1:stop])


@pytest.mark.parametrize("index", [slice(1, -1), slice(1, 0), slice(1, None, 2), slice(-1, 0, -1)])
def test_slices_of_sizes_that_vary(index: slice) -> None:
    """With symbols too a slice that is empty has NumPy's value, and bounds outside of the axis are errors."""
    for rows in (5, 4, 6, 7, 2, 1, 0, 3, 1):
        for _ in range(4):
            a = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
            x = Tensor.constant(a) * 2
            if rows:
                np.testing.assert_array_equal(x[index].to_numpy(), (a * 2)[index])
            else:
                with pytest.raises(IndexError, match="is out of range for axis 0 of size 0"):
                    x[index]
