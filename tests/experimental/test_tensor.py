"""Eager tensors against NumPy: values, recording, reuse of programs, errors."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import pickle
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

from max import driver
from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor, random
from max.experimental import functional as F
from max.experimental import tensor as tensor_module
from max.experimental.programs.number_patterns import Pattern, Symbol
from max.experimental.programs.programs import compiled_programs
from max.experimental.record.recorder import PENDING_CALLS
from max.graph import DeviceRef, Graph, TensorType, ops

F32 = DType.float32


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_operators_are_those_of_numpy() -> None:
    a, b = array(3, 4), array(3, 4, seed=1)
    x, y = Tensor.from_dlpack(a), Tensor.from_dlpack(b)
    pairs = [
        (x + y, a + b), (x - y, a - b), (x * y, a * b), (x / y, a / b), (x % y, a % b), (x // y, a // b),
        (2 + x, 2 + a), (2 - x, 2 - a), (2 * x, 2 * a), (2 / x, 2 / a), (-x, -a), (abs(x), abs(a)), (x**2, a**2),
        (x @ y.T, a @ b.T), (x > y, a > b), (x >= y, a >= b), (x < y, a < b), (x <= y, a <= b), (x == y, a == b),
        (x != y, a != b), (x < 0.5, a < 0.5), ((x > 0) & (y > 0), (a > 0) & (b > 0)),
        ((x > 0) | (y > 0), (a > 0) | (b > 0)), ((x > 0) ^ (y > 0), (a > 0) ^ (b > 0)), (~(x > 0), ~(a > 0)),
        (a + x, a + a), (divmod(x, y)[0], a // b), (x[1:, ::2], a[1:, ::2]), (x[-1], a[-1]), (x[..., 0], a[..., 0]),
        (x.reshape((4, 3)), a.reshape(4, 3)), (x.permute([1, 0]), a.T), (x.transpose(0, 1), a.T),
        (x.sum(0), a.sum(0, keepdims=True)), (x.mean(), a.mean(-1, keepdims=True)),
        (x.max(), a.max(-1, keepdims=True)), (x.min(0), a.min(0, keepdims=True)),
        (x.argmax(), a.argmax(-1)[:, None]), (x.unsqueeze(0).squeeze(0), a), (x.cast(DType.int32), a.astype(np.int32)),
        (x.broadcast_to((2, 3, 4)), np.broadcast_to(a, (2, 3, 4))),
    ]  # fmt: skip
    for index, (got, expected) in enumerate(pairs):
        assert [int(d) for d in got.shape] == list(expected.shape), index
        np.testing.assert_allclose(
            got.to_numpy(), expected, rtol=1e-5, atol=1e-5, err_msg=str(index)
        )


def test_dtype_and_shape_need_no_computation() -> None:
    x = Tensor.ones((2, 3)) + 1
    assert (x.shape, x.dtype, x.device, x.rank, x.num_elements()) == ([2, 3], F32, CPU(), 2, 6)
    assert x.type == TensorType(F32, (2, 3), DeviceRef.CPU())
    assert not x.real and x.storage is None
    with pytest.raises(TypeError, match="not computed yet"):
        _ = x.driver_tensor
    shown = Tensor.ones((2, 3)) + 1
    assert repr(shown).startswith("Tensor([[2., 2., 2.],") and shown.real, (
        "it is computed to be shown"
    )
    assert repr(shown).endswith("]], dtype=float32, device=cpu:0)")
    assert isinstance(x.realize, Tensor) and x.real
    assert isinstance(x.driver_tensor, driver.Tensor)
    assert repr(x).startswith("Tensor([[2., 2., 2.],")
    assert str(x) == str(np.full((2, 3), 2, np.float32))


def test_construction() -> None:
    with tensor_module.default_dtype(DType.int32):
        assert Tensor.ones((2,)).dtype == DType.int32
    assert tensor_module.defaults() == (F32, CPU())
    assert tensor_module.defaults(DType.int8)[0] == DType.int8
    assert Tensor.arange(5, 0, -2).to_numpy().tolist() == [5, 3, 1]
    assert Tensor.arange(3, 3).shape == [0]
    assert Tensor.arange(10, dtype=DType.int64).to_numpy().tolist() == list(range(10))
    like = TensorType(DType.int32, (2, 4), DeviceRef.CPU())
    assert Tensor.range_like(like).to_numpy().tolist() == [[0, 1, 2, 3]] * 2
    assert Tensor.full_like(like, 7).to_numpy().tolist() == [[7] * 4] * 2
    assert (
        Tensor.zeros_like(like).dtype == DType.int32
        and Tensor.ones_like(like).sum(0)[0, 0].item() == 2
    )
    assert Tensor([[1.0, 2.0]], dtype=DType.bfloat16).to_numpy().dtype == ml_dtypes.bfloat16
    assert Tensor.constant(np.array([1, 2, 3])).dtype == DType.int64
    assert Tensor.constant([1, 2]).dtype == F32
    assert Tensor.full((), math.pi).item() == np.float32(math.pi)
    assert Tensor.zeros((0, 3)).sum(0).to_numpy().tolist() == [[0, 0, 0]]
    for wrong in [
        lambda: Tensor.zeros((-1,)),
        lambda: Tensor.zeros(("n",)),
        lambda: Tensor.arange(0, 5, 0),
    ]:
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError):
        Tensor.constant([[1, 2], [3]])
    with pytest.raises(TypeError, match="expected one of data, storage and value"):
        Tensor()


def test_a_constant_is_a_copy_and_dlpack_is_not() -> None:
    a = array(4)
    copied, shared = Tensor.constant(a), Tensor.from_dlpack(a)
    before = a.copy()
    a[:] = 0
    assert copied.to_numpy().tolist() == before.tolist()
    assert shared.to_numpy().tolist() == [0] * 4
    t = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    assert Tensor.from_dlpack(t).to_numpy().tolist() == t.tolist()
    x = (Tensor.from_dlpack(t) + 1).realize
    assert torch.from_dlpack(x).tolist() == (t + 1).tolist()
    assert np.from_dlpack(x).tolist() == np.asarray(x).tolist() == (t + 1).tolist()


def test_python_needs_values() -> None:
    x = Tensor.constant([3.0])
    assert (bool(x), int(x), float(x), f"{x:.1f}") == (True, 3, 3.0, "3.0")
    assert [0, 1, 2, 3][Tensor.constant(2, dtype=DType.int64)] == 2
    assert len(Tensor.ones((4, 2))) == 4 and [row.shape for row in Tensor.ones((2, 3))] == [
        [3],
        [3],
    ]
    for wrong in [lambda: bool(Tensor.ones((2,))), lambda: Tensor.ones((2,)).item(), lambda: len(Tensor.ones(())),
                  lambda: [0][Tensor.ones(())]]:  # fmt: skip
        with pytest.raises(TypeError):
            wrong()
    assert len({x, x}) == 1

    async def wait() -> float:
        return (await (x * 2)).item()

    assert asyncio.run(wait()) == 6.0
    twin = copy.deepcopy(x)
    twin[0] = 5
    assert (x.item(), twin.item()) == (3.0, 5.0)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda x: x + Tensor.ones((5,)), ValueError, r"\[2, 3\] and \[5\] do not broadcast"),
        (lambda x: x @ Tensor.ones((2, 3)), ValueError, "matmul"),
        (lambda x: x.reshape((5,)), ValueError, "reshape"),
        (lambda x: x[5], IndexError, "5"),
        (lambda x: x.sum(3), IndexError, "axis"),
        (lambda x: x.cast(DType.int32) + 0.5, TypeError, "float"),
        (lambda x: F.add(1, 2), TypeError, "is a Tensor"),
        (lambda x: F.constant_external("w", x.type), TypeError, "no graph is being built"),
        (lambda x: random.uniform((2,), (1, 0)), ValueError, "below the second"),
        (lambda x: random.gaussian((2,), std=0), ValueError, "above 0"),
    ],
)
def test_invalid_calls_raise_at_their_line(wrong, error, words) -> None:
    x = Tensor.ones((2, 3))
    with pytest.raises(error, match=words):
        wrong(x)
    assert (x + 1).to_numpy().max() == 2


def test_an_error_of_a_run_names_the_line_of_the_op() -> None:
    table = Tensor.ones((10, 2))
    for index in (10, 11, 12, -11):
        rows = F.gather(table, Tensor.constant([index], dtype=DType.int64), axis=0)  # the line
        doubled = rows * 2
        with pytest.raises(IndexError) as caught:
            _ = doubled.realize
        line = test_an_error_of_a_run_names_the_line_of_the_op.__code__.co_firstlineno + 3
        assert f"{__file__}:{line})" in str(caught.value)


def test_repeated_programs_are_not_compiled_again() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return F.tanh(x @ w) * 0.5 + x

    x, w = Tensor.from_dlpack(array(7, 11)), Tensor.from_dlpack(array(11, 11, seed=1))
    step(x, w).realize  # noqa: B018
    before = compiled_programs()
    expected = x.to_numpy()
    for _ in range(20):
        x = step(x, w).realize
        expected = np.tanh(expected @ w.to_numpy()) * np.float32(0.5) + expected
    assert compiled_programs() == before
    np.testing.assert_allclose(x.to_numpy(), expected, rtol=1e-3, atol=1e-4)


def test_sizes_that_vary_become_symbols() -> None:
    cache, rows = Tensor.zeros((1, 6)), [np.zeros((1, 6), np.float32)]
    before = compiled_programs()
    for step in range(40):
        row = array(1, 6, seed=step)
        rows.append(row)
        cache = F.concat([cache, Tensor.from_dlpack(row)], axis=0)
        scores = F.softmax((cache @ cache[-1].reshape((6, 1))).reshape((1, step + 2)))
        expected = np.concatenate(rows)
        logits = expected @ expected[-1]
        weights = np.exp(logits - logits.max())
        np.testing.assert_allclose(
            scores.to_numpy()[0], weights / weights.sum(), rtol=2e-5, atol=1e-7
        )
        np.testing.assert_array_equal(cache.to_numpy(), expected)
    assert compiled_programs() - before <= 8


def test_numbers_that_vary_become_inputs() -> None:
    x = Tensor.from_dlpack(array(5))
    before = compiled_programs()
    for step in range(30):
        rate = 0.1 + 0.37 * step
        np.testing.assert_allclose(
            (x * rate + 1.5).to_numpy(), x.to_numpy() * rate + 1.5, rtol=2e-7, atol=2e-7
        )
    assert compiled_programs() - before <= 3
    # 0.0, -0.0 and NaN do not become inputs: programs depend on them
    assert np.signbit((Tensor.constant([-0.0]) * 1.0).to_numpy())[0]
    assert math.isnan((x * math.nan).to_numpy()[0])


def test_bounds_of_slices_that_vary_become_symbols() -> None:
    a = array(64, 3)
    x = Tensor.from_dlpack(a)
    before = compiled_programs()
    for stop in range(3, 60):
        np.testing.assert_array_equal(x[1:stop].to_numpy(), a[1:stop])
    assert compiled_programs() - before <= 4
    # negative bounds count from the end
    for stop in (5, -3, -4, -5, -6, 7, -7):
        np.testing.assert_array_equal(x[1:stop].to_numpy(), a[1:stop])
        np.testing.assert_array_equal(x[-abs(stop) :].to_numpy(), a[-abs(stop) :])


def test_unreferenced_values_are_freed() -> None:
    def grow(x: Tensor) -> tuple[weakref.ref[Tensor], Tensor]:
        middle = x * 2
        return weakref.ref(middle), middle + 1

    dead, end = grow(Tensor.from_dlpack(array(1000)))
    gc.collect()
    assert dead() is None
    held = end * 3
    result = held + end
    _ = result.realize
    # intermediate tensors with references are computed too
    assert held.real and end.real


def test_programs_without_values_use_bounded_memory() -> None:
    x = Tensor.from_dlpack(np.float32([1.0, 2.0]))
    y = x
    before = compiled_programs()
    for _ in range(3 * PENDING_CALLS):
        y = y * 0.5 + 1.0
    assert compiled_programs() - before <= 2
    np.testing.assert_allclose(y.to_numpy(), [2, 2], rtol=1e-6)


def test_writes_come_after_the_reads_before_them() -> None:
    a = array(4, 3)
    x = Tensor.constant(a)
    doubled = x * 2
    x[1:3] = Tensor.zeros((3,))
    after = x + 0
    x[0, 0] = 9
    F.buffer_store_slice(x, Tensor.constant([5.0, 6.0, 7.0]), [3])
    np.testing.assert_array_equal(doubled.to_numpy(), a * 2)
    a[1:3] = 0
    np.testing.assert_array_equal(after.to_numpy(), a)
    a[0, 0], a[3] = 9, [5, 6, 7]
    np.testing.assert_array_equal(x.to_numpy(), a)
    F.buffer_store(x, x.T.reshape((4, 3)))
    np.testing.assert_array_equal(x.to_numpy(), a.T.reshape(4, 3))
    for wrong, error in [
        (lambda: x.__setitem__(7, 1), IndexError),
        (lambda: F.buffer_store(x, Tensor.ones((2, 2))), ValueError),
        (lambda: F.buffer_store(x, Tensor.ones((4, 3), dtype=DType.int32)), TypeError),
    ]:
        with pytest.raises(error):
            wrong()
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    copied = Tensor.from_dlpack(frozen)
    copied[0] = 1
    assert copied.to_numpy().tolist() == [1, 0, 0] and not frozen.any()


def test_data_dependent_sizes_are_known_at_once() -> None:
    a = np.array([[0, 1], [2, 0], [3, 4]], np.float32)
    indices = F.nonzero(Tensor.from_dlpack(a) * 1.0, "n")
    assert indices.shape == [4, 2]
    np.testing.assert_array_equal(indices.to_numpy(), np.argwhere(a))


def test_random_tensors() -> None:
    random.set_seed(7)
    first, second = random.uniform((1000,), (2, 3)), random.gaussian((1000,), mean=5.0, std=2.0)
    random.set_seed(7)
    again = random.uniform((1000,), (2, 3))
    np.testing.assert_array_equal(first.to_numpy(), again.to_numpy())
    assert (first.to_numpy() >= 2).all() and (first.to_numpy() < 3).all()
    values = second.to_numpy()
    assert abs(values.mean() - 5) < 0.3 and abs(values.std() - 2) < 0.2
    a, b = random.normal((64,)), random.normal((64,))
    assert not np.array_equal(a.to_numpy(), b.to_numpy())
    # a value that is computed again is the same
    noise = random.normal((8,))
    total, double = noise.sum(0), noise * 2
    del noise
    np.testing.assert_allclose(total.to_numpy()[0], double.to_numpy().sum() / 2, rtol=1e-5)
    like = random.uniform_like(
        TensorType(DType.bfloat16, (3,), DeviceRef.CPU()),
        (Tensor.zeros((), dtype=DType.bfloat16), 1),
    )
    assert like.dtype == DType.bfloat16


def test_in_a_graph_it_stands_for_a_value() -> None:
    x = Tensor.constant([1.0, 2.0, 3.0])
    with Graph("g", input_types=[TensorType(F32, ("n",), DeviceRef.CPU())]) as graph:
        y = Tensor.from_graph_value(graph.inputs[0])
        assert (
            y.shape == ["n"]
            and repr(y) == "Tensor(shape=[n], dtype=float32, device=cpu:0, in a graph)"
        )
        with pytest.raises(TypeError, match="no elements yet"):
            y.item()
        total = F.add(graph.inputs[0], 1)
        assert isinstance(total, Tensor)
        graph.output((y + total) * Tensor.full((), 2.0), x + 1)
    from max.engine import InferenceSession

    a, b = InferenceSession().load(graph).execute(np.float32([1, 2]))
    assert a.to_numpy().tolist() == [6, 10] and b.to_numpy().tolist() == [2, 3, 4]
    with pytest.raises(TypeError, match="of a graph that is being built"):
        F.add(x, total._value)
    with pytest.raises(LookupError):
        ops.add(1, 2)


def test_the_record_as_a_graph() -> None:
    x = Tensor.from_dlpack(array(3))
    kept = x * 2 + 1
    record = tensor_module.ComputeGraph()
    assert any(tensor is kept for tensor in record.unrealized.values())
    text = str(record.graph)
    assert "mo.mul" in text and "mo.add" in text
    asyncio.run(record.evaluate(kept))
    assert kept.real and not any(tensor is kept for tensor in record.unrealized.values())
    with pytest.raises(TypeError):
        record.add_unrealized(kept)
    with pytest.raises(TypeError):
        record.add_source(kept)


def test_threads() -> None:
    failures: list[object] = []

    def work(seed: int) -> None:
        try:
            a = array(8, 8, seed=seed)
            x = Tensor.from_dlpack(a)
            for _ in range(10):
                x = F.tanh(x @ x.T) * 0.1
                a = np.tanh(a @ a.T) * np.float32(0.1)
                np.testing.assert_allclose(x.to_numpy(), a, rtol=1e-4, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures


def test_patterns_cover_their_examples_and_the_numbers_between() -> None:
    pattern = Pattern.covering([(3, 7, 4, 6, 1.5), (5, 7, 6, 10, 1.5), (9, 7, 10, 18, 2.5)])
    assert pattern.positions == (Symbol(0), 7, Symbol(0, 1, 1), Symbol(0, 2, 0), Symbol(1))
    assert pattern.match((4, 7, 5, 8, 0.25)) == [4, 0.25]
    for other in [(4, 8, 5, 8, 1.5), (4, 7, 6, 8, 1.5), (4, 7, 5, 9, 1.5)]:
        assert pattern.match(other) is None
    rng = np.random.default_rng(3)
    for _ in range(300):
        examples = [
            tuple(int(v) for v in rng.integers(0, 4, 6)) for _ in range(int(rng.integers(1, 5)))
        ]
        covering = Pattern.covering(examples)
        for example in examples:
            values = covering.match(example)
            assert values is not None
            rebuilt = [
                values[p.number] * p.factor + p.offset if isinstance(p, Symbol) else p
                for p in covering.positions
            ]
            assert tuple(rebuilt) == example


def test_pickling_computes_and_keeps_the_elements(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 5)).astype(np.float32)
    x = Tensor.from_dlpack(a)
    y = x * 2
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        sent = {"first": x, "second": [y, y + 1, x[0, 0].cast(DType.bfloat16)]}
        got = pickle.loads(pickle.dumps(sent, protocol))
        first, (second, third, fourth) = got["first"], got["second"]
        np.testing.assert_array_equal(second.to_numpy(), 2 * a)
        np.testing.assert_array_equal(third.to_numpy(), 2 * a + 1)
        assert fourth.dtype is DType.bfloat16 and fourth.rank == 0
        # it is a tensor like any other, with memory of its own
        first[0] = 0
        np.testing.assert_array_equal((first + second).to_numpy()[0], 2 * a[0])
        np.testing.assert_array_equal(x.to_numpy(), a)
    assert y.real
    with Graph("g", input_types=[TensorType(F32, [2], DeviceRef.CPU())]) as graph:
        value = Tensor.from_graph_value(graph.inputs[0])
        for function in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="no elements yet"):
                function(value)
