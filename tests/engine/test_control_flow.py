"""`cond` and `while_loop`: interpreter and engine against Python, errors, and iterations without allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import _interpreter, mlir
from max import kernel as k
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Dim, Graph, TensorType, TensorValue, Weight, ops
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()
F32, I32, BOOL = DType.float32, DType.int32, DType.bool


def tensor(*shape: Any, dtype: DType = F32) -> TensorType:
    return TensorType(dtype, shape, DEVICE)


def constant(value: Any, dtype: DType = I32) -> Any:
    return ops.constant(value, dtype, device=DEVICE)


def graph_of(types: list[Any], build: Callable[..., Any], name: str = "graph") -> Graph:
    with Graph(name, input_types=types) as graph:
        result = build(
            *[
                v.tensor if isinstance(t, TensorType) else v.buffer
                for v, t in zip(graph.inputs, types, strict=True)
            ]
        )
        graph.output(*(result if isinstance(result, list | tuple) else [result]))
    return graph


@pytest.fixture(params=["interpreted", 1, 2], ids=["interpreted", "one worker", "two workers"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[np.ndarray]]:
    """Checks that a graph's text parses back to the same graph, and runs it."""

    def run(graph: Graph, *inputs: Any, weights: Any = None) -> list[np.ndarray]:
        module = graph.to_mlir()
        mlir.verify_module(module)
        text = str(graph)
        assert mlir.print_module(mlir.parse_module(text, mlir.resources(module))) == text
        if request.param == "interpreted":
            return _interpreter.run(graph, inputs, weights)
        session = InferenceSession(devices=[CPU()], num_threads=request.param)
        model = session.load(graph, weights_registry=weights)
        results = [out.to_numpy() for out in model.execute(*inputs)]
        return results

    return run


def test_cond(run, rng: np.random.Generator) -> None:
    graph = graph_of(
        [tensor(dtype=BOOL), tensor("n", 3)],
        lambda p, x: ops.cond(
            p, [x.type, tensor(dtype=I32)], lambda: [x * 2, constant(1)], lambda: [x, constant(0)]
        ),
    )
    x = rng.standard_normal((7, 3)).astype(np.float32)
    for choice in (True, False):
        y, which = run(graph, np.array(choice), x)
        assert_close(y, x * 2 if choice else x)
        assert which == choice


def test_results_of_a_branch_that_are_given_in(run, rng: np.random.Generator) -> None:
    """A value of the enclosing graph that a branch returns twice and as a view is copied for each result."""
    graph = graph_of(
        [tensor(dtype=BOOL), tensor(4, 3)],
        lambda p, x: ops.cond(
            p, [x.type, x.type, tensor(3, 4)], lambda: [x, x, x.T], lambda: [x + 1, x, x.T]
        ),
    )
    x = rng.standard_normal((4, 3)).astype(np.float32)
    for choice in (True, False):
        one, two, turned = run(graph, np.array(choice), x)
        assert_close(one, x if choice else x + 1)
        assert_close(two, x)
        assert_close(turned, x.T)


def test_branches_see_sizes_around_them(run) -> None:
    """The branch uses the size n, which is no dimension of its operands."""
    graph = graph_of(
        [tensor(dtype=BOOL), tensor("n"), tensor()],
        lambda p, x, y: (
            ops.cond(
                p,
                [tensor("n")],
                lambda: ops.broadcast_to(y, ["n"]),
                lambda: ops.broadcast_to(y * 2, ["n"]),
            )[0]
            + x
        ),
    )
    x = np.arange(5, dtype=np.float32)
    assert_close(run(graph, np.array(False), x, np.float32(3))[0], x + 6)


def test_branches_and_loops_see_the_sizes_of_their_subgraph(run) -> None:
    """Its sizes have other names than those of its caller, and are no sizes of operands of the branch or the body."""
    with Graph("outer", input_types=[tensor("n"), tensor(dtype=BOOL)]) as graph:
        x, choice = [v.tensor for v in graph.inputs]
        sized = graph.add_subgraph("sized", input_types=[tensor("rows"), tensor(dtype=BOOL)])
        with sized:
            y, flag = [v.tensor for v in sized.inputs]
            rows = TensorType(I32, [], DEVICE)
            (ones,) = ops.cond(
                flag,
                [tensor("rows")],
                lambda: ops.broadcast_to(constant(1.0, F32), ["rows"]),
                lambda: ops.broadcast_to(constant(2.0, F32), ["rows"]),
            )
            total, _ = ops.while_loop(
                [constant(0), constant(0)],
                lambda total, i: i < TensorValue(Dim("rows")).cast(I32),
                lambda total, i: [total + TensorValue(Dim("rows")).cast(I32), i + 1],
            )
            assert total.type == rows
            sized.output(y + ones, total)
        for _ in range(2):
            x, squared = [v.tensor for v in ops.call(sized, x, choice)]
        graph.output(x, squared)
    x = np.arange(5, dtype=np.float32)
    for choice in (True, False):
        got, squared = run(graph, x, np.array(choice))
        assert_close(got, x + (2 if choice else 4))
        assert squared == 25


def test_nested_choices(run) -> None:
    def build(i: Any, x: Any) -> Any:
        def inner() -> Any:
            return ops.cond(i < 5, [x.type], lambda: x + 10, lambda: x * i.cast(F32))[0]

        return ops.cond(i < 0, [x.type], lambda: -x, inner)[0]

    graph = graph_of([tensor(dtype=I32), tensor(3)], build)
    x = np.array([1, 2, 3], np.float32)
    for i, want in ((-1, -x), (2, x + 10), (7, x * 7)):
        assert_close(run(graph, np.int32(i), x)[0], want)


@pytest.mark.parametrize("turns", [0, 1, 2, 37])
def test_while(run, turns: int, rng: np.random.Generator) -> None:
    def build(n: Any, x: Any) -> Any:
        return ops.while_loop(
            (constant(0), x, constant(False, BOOL)),
            lambda i, s, odd: i < n,
            lambda i, s, odd: [i + 1, ops.tanh(s @ w) + x, ops.logical_not(odd)],
        )

    w = rng.standard_normal((5, 5)).astype(np.float32)
    x = rng.standard_normal((3, 5)).astype(np.float32)
    graph = graph_of([tensor(dtype=I32), tensor("n", 5)], build)
    count, state, odd = run(graph, np.int32(turns), x)
    want = x
    for _ in range(turns):
        want = np.tanh(want @ w) + x
    assert count == turns and odd == bool(turns % 2)
    assert_close(state, want, scale=20.0)


@pytest.mark.parametrize(
    "dtype", [DType.int64, DType.uint8, DType.float64, DType.bfloat16, DType.bool]
)
def test_carried_dtypes(run, dtype: DType) -> None:
    def step(i: Any, s: Any) -> Any:
        return [i + 1, ops.logical_not(s) if dtype is BOOL else s + s]

    graph = graph_of(
        [tensor(3, dtype=dtype)],
        lambda x: ops.while_loop([constant(0), x], lambda i, _: i < 3, step)[1],
    )
    x = np.array([1, 0, 1]).astype(dtype.to_numpy())
    want = ~x if dtype is BOOL else (x * 8).astype(x.dtype)
    np.testing.assert_array_equal(run(graph, x)[0], want)


def test_loops_in_loops(run) -> None:
    """Sums of triangle numbers by nested loops; the inner loop runs 0 to n - 1 iterations and starts with new values
    each time.
    """

    def build(n: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            _, inner = ops.while_loop(
                [constant(0), total], lambda j, _: j < i, lambda j, t: [j + 1, t + j]
            )
            return [i + 1, inner]

        return ops.while_loop([constant(0), constant(0)], lambda i, _: i < n, body)[1]

    graph = graph_of([tensor(dtype=I32)], build)
    for n in (0, 1, 6, 20):
        assert run(graph, np.int32(n))[0] == sum(j for i in range(n) for j in range(i))


def test_large_carried_values_and_work_for_all_workers(run, rng: np.random.Generator) -> None:
    """Counters that distribute the work of a kernel are zero at the start of each iteration, in inner loops too."""
    w = (rng.standard_normal((96, 96)) / 10).astype(np.float32)

    def build(x: Any) -> Any:
        weights = constant(w, F32)

        def outer(i: Any, s: Any) -> Any:
            def inner(j: Any, t: Any) -> Any:
                return [j + 1, ops.softmax(t @ weights, axis=1)]

            return [i + 1, ops.while_loop([constant(0), s], lambda j, _: j < 3, inner)[1]]

        return ops.while_loop([constant(0), x], lambda i, _: i < 4, outer)[1]

    x = rng.standard_normal((200, 96)).astype(np.float32)
    want = x
    for _ in range(12):
        y = want @ w
        want = np.exp(y - y.max(1, keepdims=True))
        want /= want.sum(1, keepdims=True)
    assert_close(run(graph_of([tensor("rows", 96)], build), x)[0], want, scale=10.0)


def test_buffers_in_branches_and_bodies(run) -> None:
    def build(n: Any, history: Any, total: Any) -> Any:
        def body(i: Any) -> Any:
            def even() -> None:
                ops.buffer_store_slice(history, ops.buffer_load(history)[0:1] + 1, [slice(0, 1)])

            def odd() -> None:
                history[...] = history[...] * 2

            ops.cond(ops.equal(i % 2, 0), None, even, odd)
            total[...] = total[...] + ops.sum(history[...], axis=0)
            return i + 1

        before = ops.buffer_load(total)
        ops.while_loop(constant(0), lambda i: i < n, body)
        return [before, ops.buffer_load(history)]

    types = [tensor(dtype=I32), BufferType(F32, [3], DEVICE), BufferType(F32, [1], DEVICE)]
    graph = graph_of(types, build)
    history, total = np.ones(3, np.float32), np.zeros(1, np.float32)
    before, after = run(graph, np.int32(5), history, total)
    want, sum_ = np.ones(3, np.float32), 0.0
    for i in range(5):
        if i % 2 == 0:
            want[0] += 1
        else:
            want *= 2
        sum_ += want.sum()
    assert_close(history, want)
    assert_close(after, want)
    assert_close(total, np.array([sum_], np.float32))
    assert before == 0


def test_weights_in_branches(run, rng: np.random.Generator) -> None:
    """Branches share the graph's weights; an expression of weights alone is computed once, whichever branch runs."""
    w = Weight("w", F32, [4, 4], DEVICE)
    v = Weight("v", F32, [4, 4], DEVICE)
    graph = graph_of(
        [tensor(dtype=BOOL), tensor("n", 4)],
        lambda p, x: ops.cond(p, [x.type], lambda: x @ (w + v), lambda: x @ w)[0] @ v,
    )
    weights = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in "wv"}
    x = rng.standard_normal((3, 4)).astype(np.float32)
    for choice in (True, False):
        first = weights["w"] + weights["v"] if choice else weights["w"]
        got = run(graph, np.array(choice), x, weights=weights)[0]
        assert_close(got, x @ first @ weights["v"], scale=10.0)


def test_in_a_subgraph_with_a_prefix(run, rng: np.random.Generator) -> None:
    with Graph("outer", input_types=[tensor("n", 4), tensor(dtype=I32)]) as graph:
        x, turns = [v.tensor for v in graph.inputs]
        layer = graph.add_subgraph("layer", input_types=[tensor("rows", 4), tensor(dtype=I32)])
        with layer:
            y, n = [v.tensor for v in layer.inputs]
            w = Weight("w", F32, [4, 4], DEVICE)
            layer.output(
                ops.while_loop(
                    [constant(0), y], lambda i, _: i < n, lambda i, s: [i + 1, ops.tanh(s @ w)]
                )[1]
            )
        for i in range(2):
            (x,) = [v.tensor for v in ops.call(layer, x, turns, prefix=f"layers.{i}.")]
        graph.output(x)
    weights = {f"layers.{i}.w": rng.standard_normal((4, 4)).astype(np.float32) for i in range(2)}
    x = rng.standard_normal((3, 4)).astype(np.float32)
    want = x
    for w in weights.values():
        for _ in range(3):
            want = np.tanh(want @ w)
    assert_close(run(graph, x, np.int32(3), weights=weights)[0], want, scale=10.0)


def test_sizes_and_prints_inside(run, capfd: pytest.CaptureFixture[str]) -> None:
    """A loop whose values the host must read is executed by the host."""

    def build(x: Any, n: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            found = ops.gather(x, ops.nonzero(x > i.cast(F32), "k").reshape([-1]), axis=0)
            picked = ops.sum(found, axis=0).reshape([])
            ops.print(picked, label="picked")
            (more,) = ops.cond(
                picked > 3.0,
                [picked.type],
                lambda: ops.sum(
                    ops.gather(x, ops.nonzero(x > 0.5, "j").reshape([-1]), axis=0), axis=0
                ).reshape([]),
                lambda: picked * 100,
            )
            return [i + 1, total + more]

        return ops.while_loop([constant(0), constant(0.0, F32)], lambda i, _: i < n, body)[1]

    x = np.array([0.3, 1.5, 2.5, -1, 0.7], np.float32)
    graph = graph_of([tensor("n"), tensor(dtype=I32)], build)
    for turns in (0, 1, 4):
        want = 0.0
        for i in range(turns):
            picked = x[x > i].sum()
            want += x[x > 0.5].sum() if picked > 3 else picked * 100
        capfd.readouterr()
        assert_close(run(graph, x, np.int32(turns))[0], np.float32(want))
        assert capfd.readouterr().out.count("picked") == turns


def test_a_size_of_a_branch_and_one_of_a_later_op_have_one_name(run) -> None:
    """They are sizes of their own: the branch does not know what is computed after it."""

    def build(x: Any, flag: Any) -> Any:
        def total(values: Any) -> Any:
            return ops.sum(ops.nonzero(values, "k").reshape([-1]), axis=0)

        (inside,) = ops.cond(
            flag, [tensor(1, dtype=DType.int64)], lambda: total(x), lambda: total(x - 2)
        )
        (looped,) = ops.while_loop([inside], lambda i: i[0] < 50, lambda i: [i + total(x + 2) + 1])
        return inside, looped, ops.nonzero(x + 1, "k")

    x = np.array([0, 1, 2, 2, -1, 0], np.float32)
    graph = graph_of([tensor("n"), tensor(dtype=DType.bool)], build)
    for flag in (True, False):
        inside = np.nonzero(x if flag else x - 2)[0].sum()
        looped = inside
        while looped < 50:
            looped += np.nonzero(x + 2)[0].sum() + 1
        found = run(graph, x, np.array(flag))
        assert (found[0].tolist(), found[1].tolist()) == ([inside], [looped])
        np.testing.assert_array_equal(found[2], np.argwhere(x + 1))


def test_sizes_that_a_subgraph_finds_out(run) -> None:
    with Graph("picks", input_types=[tensor("n"), tensor("n")]) as graph:
        x, y = [v.tensor for v in graph.inputs]
        pick = graph.add_subgraph(
            "pick",
            lambda a: (
                ops.gather(a.tensor, ops.nonzero(a.tensor > 0, "k").reshape([-1]), axis=0) * 2
            ),
            [tensor("m")],
        )
        (one,), (other,) = (
            [v.tensor for v in ops.call(pick, x)],
            [v.tensor for v in ops.call(pick, y)],
        )
        graph.output(one + other)
    x, y = np.array([1, -1, 2, 3], np.float32), np.array([-1, 5, 6, 7], np.float32)
    assert_close(run(graph, x, y)[0], (x[x > 0] + y[y > 0]) * 2)


def test_sizes_of_two_calls_that_differ() -> None:
    with Graph("picks", input_types=[tensor("n"), tensor("n")]) as graph:
        x, y = [v.tensor for v in graph.inputs]
        pick = graph.add_subgraph(
            "pick", lambda a: ops.nonzero(a.tensor > 0, "k").reshape([-1]), [tensor("m")]
        )
        graph.output(ops.call(pick, x)[0].tensor + ops.call(pick, y)[0].tensor)
    model = InferenceSession(devices=[CPU()]).load(graph)
    with pytest.raises(ValueError, match="two calls of pick differ in k"):
        model.execute(np.ones(3, np.float32), np.zeros(3, np.float32))


@k.register("test.raise_at")
def raise_at(out: k.Output, x: k.Input, limit: k.Input, ctx: k.Context):
    for i in ctx.parallel(x.shape[0]):
        if x[i] >= limit[0]:
            raise ValueError("{} is at the limit", x[i])
        out[i] = x[i] + 1


@pytest.mark.parametrize("threads", [1, 2])
def test_errors_in_a_loop_leave_it(threads: int) -> None:
    """Errors of kernels also end a loop that would not terminate."""

    def build(x: Any, limit: Any) -> Any:
        def body(s: Any) -> Any:
            return ops.custom("test.raise_at", DEVICE, [s, limit], [s.type])[0].tensor

        return ops.while_loop(x, lambda s: ops.equal(s[0], s[0]), body)[0]

    model = InferenceSession(devices=[CPU()], num_threads=threads).load(
        graph_of([tensor(3, dtype=I32), tensor(1, dtype=I32)], build)
    )
    for _ in range(3):
        with pytest.raises(ValueError, match="50 is at the limit"):
            model.execute(np.zeros(3, np.int32), np.array([50], np.int32))


def test_capture_and_replay() -> None:
    graph = graph_of(
        [tensor("n"), tensor(1, dtype=I32)],
        lambda x, n: ops.while_loop(
            [constant(0), x], lambda i, _: i < n[0], lambda i, s: [i + 1, s * 2]
        )[1],
    )
    model = InferenceSession(devices=[CPU()]).load(graph)
    from max.driver import Tensor

    x, n = Tensor.from_numpy(np.ones(5, np.float32)), Tensor.from_numpy(np.array([3], np.int32))
    (out,) = model.capture(1, x, n)
    assert out.to_numpy().tolist() == [8] * 5
    n.to_numpy()[0] = 5
    model.replay(1, x, n)
    assert out.to_numpy().tolist() == [32] * 5
    model.debug_verify_replay(1, x, n)


def test_a_constant_predicate_is_decided_at_compile_time() -> None:
    graph = graph_of(
        [tensor(3)],
        lambda x: ops.cond(constant(True, BOOL), [x.type], lambda: ops.tanh(x), lambda: ops.exp(x))[
            0
        ],
    )
    model = InferenceSession(devices=[CPU()]).load(graph)
    assert model.kernel_summaries == ["tanh"]
    x = np.array([1, 2, 3], np.float32)
    assert_close(model.execute(x)[0].to_numpy(), np.tanh(x))


def test_a_loop_holds_what_it_uses() -> None:
    """Memory of values that were computed before a loop is not reused while the loop runs."""
    rng = np.random.default_rng(3)

    def build(x: Any) -> Any:
        kept = [ops.exp(x * (0.1 * i)) for i in range(4)]
        # matmul needs a contiguous operand in memory of its own
        kept = [value @ constant(np.eye(16), F32) for value in kept]

        def body(i: Any, s: Any) -> Any:
            temporary = s @ constant(np.eye(16) * 0.5, F32)
            first = ops.softmax(temporary + kept[0], axis=1) @ constant(np.eye(16), F32)
            return [i + 1, first + kept[1] + ops.tanh(temporary) * kept[2] + kept[3]]

        return ops.while_loop([constant(0), x], lambda i, _: i < 6, body)[1]

    x = rng.uniform(-1, 1, (9, 16)).astype(np.float32)
    kept, want = [np.exp(x * np.float32(0.1 * i)) for i in range(4)], x
    for _ in range(6):
        half = want * 0.5
        e = np.exp(half + kept[0])
        want = e / e.sum(1, keepdims=True) + kept[1] + np.tanh(half) * kept[2] + kept[3]
    got = InferenceSession(devices=[CPU()]).load(graph_of([tensor("n", 16)], build)).execute(x)
    assert_close(got[0].to_numpy(), want, scale=20.0)


def test_from_the_disk_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from max._compiler.stats import stats
    from max._config import flags

    graph = graph_of(
        [tensor(dtype=I32)],
        lambda n: ops.while_loop(
            [constant(0), constant(1)], lambda i, _: i < n, lambda i, s: [i + 1, s * 2]
        )[1],
    )
    with flags.override(MAX_CHECK=1, MAX_CACHE_DIR=str(tmp_path)):
        for _ in range(2):
            model = InferenceSession(devices=[CPU()]).load(graph)
            assert model.execute(np.int32(10))[0].to_numpy() == 1024
        assert stats.from_disk >= 1


MISTAKES: list[tuple[str, Callable[..., Any], type[Exception], str]] = [
    ("predicate of floats", lambda x, i: ops.cond(x[0], None, lambda: None, lambda: None), TypeError,
        "cond: the predicate is .*expected a tensor of bool"),
    ("predicate of rank 1", lambda x, i: ops.cond(x > 0, None, lambda: None, lambda: None), ValueError, "rank 0"),
    ("too few results", lambda x, i: ops.cond(i < 0, [x.type], lambda: x, lambda: None), ValueError,
        "cond: else_fn returns 0 values, out_types has 1"),
    ("results without out_types", lambda x, i: ops.cond(i < 0, None, lambda: x, lambda: None), ValueError,
        "cond: then_fn returns 1 values, out_types has 0"),
    ("another type", lambda x, i: ops.cond(i < 0, [x.type], lambda: x, lambda: i), ValueError,
        r"cond: result 0 of else_fn is si32\[\], out_types has f32\[n\]"),
    ("no tensor", lambda x, i: ops.cond(i < 0, [x.type], lambda: "x", lambda: x), TypeError,
        "cond: result 0 of then_fn is 'x'"),
    ("unknown size", lambda x, i: ops.cond(i < 0, [tensor("m")], lambda: x, lambda: x), ValueError,
        "cond: the dimension 'm' is unknown"),
    ("no values", lambda x, i: ops.while_loop([], lambda: i < 0, lambda: []), ValueError,
        "while_loop: there are no initial values"),
    ("body of another type", lambda x, i: ops.while_loop(i, lambda j: j < 0, lambda j: x), ValueError,
        "while_loop: result 0 of body is f32"),
    ("body without results", lambda x, i: ops.while_loop(i, lambda j: j < 0, lambda j: None), ValueError,
        "while_loop: body returns 0 values"),
    ("predicate of ints", lambda x, i: ops.while_loop(i, lambda j: j, lambda j: j), TypeError,
        "while_loop: the predicate is"),
    ("two predicates", lambda x, i: ops.while_loop(i, lambda j: [j < 0, j < 1], lambda j: j), TypeError,
        "returns 2 values"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistakes(call: Callable[..., Any], error: type[Exception], message: str) -> None:
    with Graph("mistake", input_types=[tensor("n"), tensor(dtype=I32)]) as graph:
        x, i = [v.tensor for v in graph.inputs]
        with pytest.raises(error, match=message):
            call(x, i)
        # the graph is unchanged and can still be used
        graph.output(x)
    assert_close(
        _interpreter.run(graph, [np.ones(2, np.float32), np.int32(1)])[0], np.ones(2, np.float32)
    )


def test_a_buffer_cannot_be_carried() -> None:
    with Graph("buffer", input_types=[BufferType(F32, [3], DEVICE)]) as graph:
        with pytest.raises(NotImplementedError, match="a buffer cannot be carried"):
            ops.while_loop(graph.inputs[0], lambda b: constant(True, BOOL), lambda b: b)


def test_values_of_one_branch_are_not_the_others() -> None:
    with Graph("mixed", input_types=[tensor(dtype=BOOL), tensor(3)]) as graph:
        p, x = [v.tensor for v in graph.inputs]
        kept: list[Any] = []

        def then() -> Any:
            kept.append(x + 1)
            return kept[0]

        with pytest.raises(ValueError, match="not of the graph|of another graph"):
            ops.cond(p, [x.type], then, lambda: kept[0] * 2)
        with pytest.raises(ValueError, match="not of the graph"):
            ops.tanh(kept[0])
