"""Buffers and custom ops: effects happen in program order, through subgraphs too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from max import kernel as k
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, Graph, TensorType, ops
from tests.engine.conftest import DEVICE, buffer, tensor
from tests.tolerance import assert_close

Load = Callable[..., Model]


def test_loads_see_stores_in_order(load: Load, rng: np.random.Generator) -> None:
    def build(b, x):
        first = b[...]
        b[...] = first * 2 + x
        second = b[...]
        b[1:3, :] = x[1:3, :]
        third = b[...]
        b[...] = third + 1
        return first, second, third, first + second

    model = load([buffer("n", 4), tensor("n", 4)], build)
    held, x = rng.standard_normal((5, 4), np.float32), rng.standard_normal((5, 4), np.float32)
    start = held.copy()
    outputs = [o.to_numpy() for o in model.execute(held, x)]
    second = start * 2 + x
    third = second.copy()
    third[1:3] = x[1:3]
    for got, want in zip(
        [*outputs, held], [start, second, third, start + second, third + 1], strict=True
    ):
        assert_close(got, want)


def test_a_load_copies_where_its_buffer_changes_later(load: Load) -> None:
    def exchange(b, x):
        before = b[...]
        b[...] = x
        return before

    model = load([buffer(3), tensor(3)], exchange)
    held, x = np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32)
    (before,) = model.execute(held, x)
    assert before.to_numpy().tolist() == [1, 2, 3] and held.tolist() == [4, 5, 6]
    assert "copy" in model.kernel_summaries

    def double(b, x):
        b[...] = x
        return b[...] * 2 + b[...]

    model = load([buffer(3), tensor(3)], double)
    assert "copy" not in model.kernel_summaries
    assert model.execute(held, x)[0].to_numpy().tolist() == [12, 15, 18]


def test_buffers_of_one_execution(load: Load) -> None:
    """They begin with their value each time; each is one memory of its own."""

    def build(x):
        one, other = [ops.buffer_create(buffer("n", 2), init_value=v) for v in (1.0, 2.0)]
        one[...] = one[...] + x
        other[...] = other[...] * one[...]
        one[...] = one[...] - 5
        return one[...], other[...]

    model = load([tensor("n", 2)], build)
    for rows in (3, 1, 4):
        x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        one, other = [y.to_numpy() for y in model.execute(x)]
        assert_close(one, x - 4)
        assert_close(other, 2 * (x + 1))


def test_a_buffer_through_subgraphs(load: Load, session: InferenceSession) -> None:
    with Graph("counter", input_types=[buffer("n"), tensor("n")]) as graph:
        with graph.add_subgraph("add", input_types=[buffer("n"), tensor("n")]) as sub:
            sub.inputs[0].buffer[...] = sub.inputs[0].buffer[...] + sub.inputs[1].tensor
            sub.output()
        for _ in range(4):
            ops.call(sub, *graph.inputs)
        graph.output(graph.inputs[0].buffer[...] * 10)
    model = session.load(graph)
    held = np.zeros(3, np.float32)
    (out,) = model.execute(held, np.array([1, 2, 3], np.float32))
    assert held.tolist() == [4, 8, 12] and out.to_numpy().tolist() == [40, 80, 120]


@pytest.mark.parametrize("depth", [1, 2])
def test_one_buffer_that_a_subgraph_has_as_two(session: InferenceSession, depth: int) -> None:
    """What it loads from one is as it was, though it stores to the other; also through a call in between."""
    types = [buffer(2, 3), buffer(2, 3), tensor(2, 3)]
    with Graph("same", input_types=types) as graph:
        callee = None
        for level in range(depth):
            with graph.add_subgraph(f"exchange{level}", input_types=types) as sub:
                one, other = sub.inputs[0].buffer, sub.inputs[1].buffer
                new = sub.inputs[2].tensor
                if callee is None:
                    old = one[...]
                    other[:, ::2] = new[:, ::2]
                else:
                    (result,) = ops.call(callee, one, other, new)
                    old = result.tensor
                sub.output(old)
            callee = sub
        assert callee is not None
        held, _, given = graph.inputs
        (old,) = ops.call(callee, held, held, given)
        graph.output(old.tensor, held.buffer[...])
    before, new = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), -1, np.float32)
    after = before.copy()
    after[:, ::2] = new[:, ::2]
    held = before.copy()
    results = session.load(graph).execute(held, np.zeros_like(held), new)
    for got, want in zip(
        [*[r.to_numpy() for r in results], held], [before, after, after], strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_swap_through_buffers(load: Load) -> None:
    def swap(a, b):
        x, y = a[...], b[...]
        a[...] = y
        b[...] = x

    a, b = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    load([buffer(2), buffer(2)], swap).execute(a, b)
    assert a.tolist() == [3, 4] and b.tolist() == [1, 2]


@k.register("test.scale_rows")
def scale_rows(out: k.Output, x: k.Input, factor: k.Input, ctx: k.Context, *, offset: int = 0):
    for i in ctx.parallel(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * factor[i] + offset


@k.register("test.count_up")
def count_up(counter: k.InOut, limit: k.Input, ctx: k.Context):
    for i in ctx.parallel(counter.shape[0]):
        if counter[i] >= limit[0]:
            raise ValueError("the counter {} is at its limit, {}", i, limit[0])
        counter[i] = counter[i] + 1


def test_custom_op(load: Load, rng: np.random.Generator) -> None:
    def build(x, f):
        (scaled,) = ops.custom("test.scale_rows", DEVICE, [x + 1, f], [x.type], {"offset": 3})
        return ops.relu(scaled.tensor)

    model = load([tensor("n", 5), tensor("n")], build)
    x, f = rng.standard_normal((7, 5), np.float32), rng.standard_normal(7, np.float32)
    assert_close(model.execute(x, f)[0].to_numpy(), np.maximum((x + 1) * f[:, None] + 3, 0))
    assert "test.scale_rows" in " ".join(model.kernel_summaries)


def test_custom_op_in_place_that_raises(load: Load) -> None:
    model = load([buffer("n", dtype=DType.int32), tensor(1, dtype=DType.int32)], _count)
    counter, limit = np.zeros(3, np.int32), np.array([2], np.int32)
    for want in (1, 2):
        (copy,) = model.execute(counter, limit)
        assert counter.tolist() == [want] * 3 == copy.to_numpy().tolist()
    with pytest.raises(ValueError, match="is at its limit, 2"):
        model.execute(counter, limit)
    assert model.execute(np.zeros(3, np.int32), limit)[0].to_numpy().tolist() == [1, 1, 1]


def _count(counter, limit):
    ops.inplace_custom("test.count_up", DEVICE, [counter, limit])
    return counter[...]


def test_unknown_custom_op(load: Load) -> None:
    with pytest.raises(NameError, match="'test.scale_row'.*did you mean 'test.scale_rows'"):
        load([tensor(2)], lambda x: ops.custom("test.scale_row", DEVICE, [x], [x.type])[0].tensor)


def test_custom_extensions(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "ops.py").write_text(
        "from max import kernel as k\n\n"
        "@k.register('test.from_file')\n"
        "def twice(out: k.Output, x: k.Input, ctx: k.Context):\n"
        "    for i in ctx.parallel(x.shape[0]):\n"
        "        out[i] = x[i] * 2\n"
    )
    with Graph("g", input_types=[tensor("n")], custom_extensions=[tmp_path]) as graph:
        x = graph.inputs[0].tensor
        graph.output(
            ops.custom("test.from_file", DEVICE, [x], [TensorType(DType.float32, ("n",), DEVICE)])[
                0
            ].tensor
        )
    session = InferenceSession()
    model = session.load(graph, custom_extensions=tmp_path)
    assert model.execute(np.ones(3, np.float32))[0].to_numpy().tolist() == [2, 2, 2]
    mojo = tmp_path / "mojo"
    mojo.mkdir()
    (mojo / "add.mojo").write_text("fn main(): pass")
    for path in (mojo, mojo / "add.mojo"):
        with pytest.raises(
            ValueError, match=r"add\.mojo is a kernel in Mojo.*max\.kernel\.register"
        ):
            InferenceSession(custom_extensions=path)
    with pytest.raises(FileNotFoundError, match="custom_extensions"):
        InferenceSession(custom_extensions=[tmp_path / "none.py"])
    (tmp_path / "ops.txt").write_text("")
    with pytest.raises(ValueError, match="not a Python file"):
        InferenceSession(custom_extensions=str(tmp_path / "ops.txt"))


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_a_loop_fills_a_buffer_beside_its_temporaries(
    load: Load, rng: np.random.Generator, steps: int
) -> None:
    """A created buffer whose first use is in a loop holds what all iterations stored."""

    def build(x):
        kept = ops.buffer_create(BufferType(DType.float32, [steps, 2, 8], DEVICE))

        def body(number, state):
            row = ops.gather(x, number, 0)
            state = state * 0.5 + ops.unsqueeze(row, 2) * ops.unsqueeze(row, 1)
            product = ops.squeeze(ops.unsqueeze(row, 1) @ state, 1)
            ops.buffer_store_slice(
                kept, ops.unsqueeze(product, 0), [(slice(number, number + 1), 1)]
            )
            return number + 1, state

        start = ops.broadcast_to(ops.constant(np.float32(0)), [2, 8, 8])
        ops.while_loop([ops.constant(0), start], lambda number, state: number < steps, body)
        return kept[...]

    model = load([tensor(steps, 2, 8)], build)
    x = rng.standard_normal((steps, 2, 8), np.float32)
    state, wanted = np.zeros((2, 8, 8), np.float32), []
    for row in x:
        state = state * 0.5 + row[:, :, None] * row[:, None, :]
        wanted.append((row[:, None, :] @ state)[:, 0])
    assert_close(model.execute(x)[0].to_numpy(), np.stack(wanted))
