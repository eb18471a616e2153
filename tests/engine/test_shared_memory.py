"""Inputs that share memory with mutable inputs: read with their values before the execution, or refused with both
names.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from max.driver import Tensor
from max.dtype import DType
from max.engine.loop import ModelLoop
from max.engine.run import input_binding
from max.graph import ops
from tests.engine.conftest import buffer, tensor


def swapped(b, x):
    """Writes to the buffer before it reads the input."""
    ops.buffer_store(b, ops.buffer_load(b) * 10.0)
    return x + 0.0


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[2:], lambda a: a[:3], lambda a: a[1:2]])
def test_an_input_is_read_as_it_was(load, view):
    model = load([buffer("n"), tensor("m")], swapped)
    array = np.arange(1, 7, dtype=np.float32)
    given = view(array)
    before = given.copy()
    (y,) = model.execute(array, given)
    np.testing.assert_array_equal(y.to_numpy(), before)
    np.testing.assert_array_equal(array, np.arange(1, 7) * 10)
    # the same input in its own memory is not copied
    assert model._binder.bind([array, before])[0][1]._ptr == before.ctypes.data
    (y,) = model.execute(Tensor.from_numpy(array), Tensor.from_numpy(given))
    np.testing.assert_array_equal(y.to_numpy(), before * 10)


def test_two_buffers_that_overlap_are_refused(load):
    def both(b, c):
        ops.buffer_store(b, ops.buffer_load(b) + 1.0)
        ops.buffer_store(c, ops.buffer_load(c) + 2.0)

    model = load([buffer("n"), buffer("m")], both, name="both")
    array = np.zeros(8, np.float32)
    for first, second in (
        (array, array),
        (array[:5], array[4:]),
        (array[3:4], array),
        (array, array[3:4]),
    ):
        with pytest.raises(
            ValueError,
            match=r"'input0' of both .*buffer.*'input1' of both .*share memory.*writes to both",
        ):
            model.execute(first, second)
    assert (array == 0).all()
    model.execute(array[:4], array[4:])
    model.execute(array[:0], array)
    np.testing.assert_array_equal(array, [3, 3, 3, 3, 4, 4, 4, 4])


def test_inputs_that_are_only_read_may_be_one(load):
    model = load([buffer("n"), tensor("n"), tensor("n")], lambda b, x, y: (swapped(b, x + y), x)[0])
    x, b = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    (z,) = model.execute(b, x, x)
    np.testing.assert_array_equal(z.to_numpy(), 2 * x)
    bound = model._binder.bind([b, x, x])[0]
    assert bound[1]._ptr == bound[2]._ptr == x.ctypes.data


def test_what_is_repeated_takes_no_copy(load):
    model = load([buffer("n"), tensor("n")], swapped, name="swapped")
    array, other = Tensor.zeros((4,), DType.float32), Tensor.zeros((4,), DType.float32)
    with pytest.raises(
        ValueError, match=r"'input0' of swapped.*'input1' of swapped.*share memory.*copy"
    ):
        model.capture(1, array, array)
    model.capture(1, array, other)
    with pytest.raises(ValueError, match="share memory"):
        model.replay(1, other, other)
    model.replay(1, other, array)

    again = Tensor.zeros((1,), DType.uint8)
    after = load(
        [buffer(1, dtype=DType.uint8)], lambda b: ops.buffer_store(b, ops.buffer_load(b) * 0)
    )
    loop = ModelLoop(model, after)
    with pytest.raises(ValueError, match="share memory"):
        loop.run([array, array], lambda _: [again], again)
    loop.run([array, other], lambda _: [again], again)


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_are_found_as_by_numpy(load, seed, monkeypatch):
    """Both overlap checks against `numpy.shares_memory`, with parts of one array."""
    rng = random.Random(seed)
    count = rng.randint(2, 9)
    types = [rng.choice([buffer, tensor])(f"n{i}") for i in range(count)]
    if not any(type_.__class__ is buffer("n").__class__ for type_ in types):
        types[0] = buffer("n0")
    model = load(
        types,
        lambda *values: (values[0] if types[0] == tensor("n0") else ops.buffer_load(values[0])) + 1,
    )
    if seed % 2:
        monkeypatch.setattr(input_binding, "MOST_PAIRS", 0)
    binder = input_binding.InputBinder(
        "m", model._binder.inputs, model._binder.names, model._binder.symbols
    )
    whole = np.zeros(40, np.float32)
    for _ in range(200):
        parts = []
        for _ in range(count):
            start = rng.randint(0, 40)
            parts.append(
                whole[start : rng.randint(start, min(40, start + rng.choice([1, 3, 8, 40])))]
            )
        written = [info.mutable for info in binder.inputs]
        pairs = [
            (i, j) for i in range(count) for j in range(i) if np.shares_memory(parts[i], parts[j])
        ]
        clash = any(written[i] and written[j] for i, j in pairs)
        copies = {j if written[i] else i for i, j in pairs if written[i] != written[j]}
        if clash:
            with pytest.raises(ValueError, match="share memory"):
                binder.bind(parts)
            continue
        bound = binder.bind(parts)[0]
        for i, part in enumerate(parts):
            if part.size:
                assert (bound[i]._ptr != part.ctypes.data) == (i in copies)
