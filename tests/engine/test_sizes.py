"""Sizes that are known only at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import Dim, Graph, TensorValue, ops
from tests.engine.conftest import DEVICE, tensor
from tests.engine.test_robustness import in_threads
from tests.tolerance import assert_close

Load = Callable[..., Model]
I64 = DType.int64


def up_to(stop: TensorValue, dim: str) -> TensorValue:
    return ops.range(0, stop, 1, dim, dtype=I64, device=DEVICE)


def test_one_size_after_another(load: Load) -> None:
    def build(x, n):
        first = up_to(n + 1, "first")
        # the second size depends on the elements of the first range
        second = up_to(ops.sum(first, 0).reshape(()), "second")
        table = ops.cast(second, DType.float32).reshape(("second", 1)) * x.reshape((1, "m"))
        return first, ops.softmax(table), ops.sum(table, 0), x * 2

    model = load([tensor("m"), tensor(dtype=I64)], build)
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    for n in (2, 0, 4, 2):
        first, soft, total, twice = (o.to_numpy() for o in model.execute(x, n))
        count = n * (n + 1) // 2
        assert first.tolist() == list(range(n + 1))
        table = np.arange(count, dtype=np.float64)[:, None] * x
        powers = np.exp(table - table.max(1, initial=-np.inf, keepdims=True))
        assert_close(soft, powers / powers.sum(1, keepdims=True))
        assert_close(total, table.sum(0, keepdims=True))
        assert_close(twice, x * 2)
    assert model.output_metadata[0].shape == [None]
    assert len(model.kernel_summaries) >= 4
    with pytest.raises(RuntimeError, match="cannot be captured"):
        model.capture(1, x, 3)


@k.register("sizes.copy")
def copy(out: k.Output, x: k.Input, ctx: k.Context):
    for i in ctx.parallel(x.shape[0]):
        out[i] = x[i]


@pytest.mark.parametrize("size", ["k", Dim("k") * 2, Dim("n") + Dim("k")], ids=str)
@pytest.mark.parametrize("op", ["custom", "range"])
def test_sizes_that_nothing_determines(load: Load, op: str, size: Any) -> None:
    """A range has the size of one symbol; no op tells how long the result of a custom op is."""

    def build(x, n):
        if op == "range":
            return ops.range(0, n, 1, size, dtype=I64, device=DEVICE)
        return ops.custom("sizes.copy", DEVICE, [x], [tensor(size)])[0].tensor

    if (op, size) == ("range", "k"):
        assert (
            len(
                load([tensor("n"), tensor(dtype=I64)], build)
                .execute(np.zeros(2, np.float32), 5)[0]
                .to_numpy()
            )
            == 5
        )
        return
    with pytest.raises(
        NotImplementedError,
        match=r"the size .*k.* of its result does not follow from the inputs of model",
    ):
        load([tensor("n"), tensor(dtype=I64)], build)


def test_each_call_discovers_its_own(session: InferenceSession) -> None:
    with Graph("calls", input_types=[tensor(dtype=I64)]) as graph:
        with graph.add_subgraph("triangle", input_types=[tensor(dtype=I64)]) as sub:
            sub.output(ops.sum(up_to(sub.inputs[0].tensor, "n"), 0).reshape(()))
        x = graph.inputs[0].tensor
        for _ in range(3):
            (x,) = (value.tensor for value in ops.call(sub, x))
        graph.output(x)
    model = session.load(graph)
    for n in (3, 4, 1):
        want = n
        for _ in range(3):
            want = want * (want - 1) // 2
        assert model.execute(n)[0].item() == want


def test_from_several_threads(load: Load) -> None:
    model = load(
        [tensor("m"), tensor(dtype=I64)],
        lambda x, n: ops.cast(up_to(n, "k"), DType.float32) + ops.sum(x, 0),
    )

    def work(index: int) -> None:
        for n in range(index, 40):
            x = np.full(n % 7 + 1, index, np.float32)
            (out,) = model.execute(x, n)
            assert out.to_numpy().tolist() == [i + index * len(x) for i in range(n)]

    in_threads(work)


def test_step_zero(load: Load) -> None:
    model = load(
        [tensor(dtype=I64)], lambda step: ops.range(0, 5, step, "n", dtype=I64, device=DEVICE)
    )
    assert model.execute(2)[0].to_numpy().tolist() == [0, 2, 4]
    assert model.execute(-1)[0].shape == (0,)
    with pytest.raises(ValueError, match="range: the step is 0"):
        model.execute(0)


def test_sizes_below_zero_are_refused(load: Load) -> None:
    def build(x):
        return ops.max_pool2d(x, (3, 3)) * 2

    model = load([tensor("n", "h", "w", 2)], build)
    assert model.execute(np.ones((1, 3, 4, 2), np.float32))[0].shape == (1, 1, 2, 2)
    for size in (0, 1, 2):
        # of 1 both sizes would be -1, and their product is not
        with pytest.raises(ValueError, match=f"larger than axis 1 of .*: h is {size}, expected"):
            model.execute(np.ones((1, size, size, 2), np.float32))


def test_counts_of_true_elements(load: Load) -> None:
    model = load([tensor("n")], lambda x: ops.nonzero(x > 0, 2))
    assert model.execute(np.array([1, -1, 3], np.float32))[0].to_numpy().tolist() == [[0], [2]]
    with pytest.raises(ValueError, match="1 elements are not 0, but the result has 2 rows"):
        model.execute(np.array([1, -1, -3], np.float32))
    one = load([tensor()], lambda x: ops.nonzero(x, "count"))
    assert [one.execute(np.float32(x))[0].shape for x in (3, 0)] == [(1, 0), (0, 0)]
    fill = load(
        [tensor("n"), tensor("m")], lambda x, u: ops.masked_scatter(x, x > 0, u, "count") + 1
    )
    x, u = np.array([1, -1, 3], np.float32), np.array([5, 6, 7], np.float32)
    assert fill.execute(x, u)[0].to_numpy().tolist() == [6, 0, 7]
    with pytest.raises(ValueError, match="fewer updates than elements that the mask selects"):
        fill.execute(x, u[:1])


def test_blocks_of_a_fold_must_fit(load: Load) -> None:
    model = load([tensor(1, 4, "l")], lambda x: ops.fold(x, (3, 4), (2, 2)))
    assert model.execute(np.ones((1, 4, 6), np.float32))[0].to_numpy().sum() == 24
    with pytest.raises(ValueError, match=r"fold: .* has l blocks, .*: l is 5, expected 6"):
        model.execute(np.ones((1, 4, 5), np.float32))
