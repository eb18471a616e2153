"""Custom ops of the kernel language on eager tensors, against NumPy and compiled graphs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import Tensor
from max.experimental import functional as F
from max.experimental.programs.programs import compiled_programs
from max.experimental.tensors import custom_ops as module
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.nn.module_v3 import Module

REF = DeviceRef.CPU()


@k.register("eager.scale")
def scale(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], ctx: k.Context, *, factor: float):
    for i in ctx.parallel(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * factor


@k.register("eager.accumulate")
def accumulate(total: k.InOut[k.f32, 2], x: k.Input[k.f32, 2], ctx: k.Context, *, times: int):
    """total[i] += times * x[n - 1 - i]: reads rows in another order than it writes them."""
    for _ in ctx.parallel(1):
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                total[i, j] = total[i, j] + times * x[x.shape[0] - 1 - i, j]


@k.register("eager.pop")
def pop(out: k.Output[k.i64, 1], stack: k.InOut[k.i64, 1], ctx: k.Context):
    """Moves the first elements into the result and negates them in the operand."""
    for i in ctx.parallel(out.shape[0]):
        if stack[i] < 0:
            raise OverflowError("element {} was taken before", i)
        out[i] = stack[i]
        stack[i] = -stack[i]


@k.register("eager.swap")
def swap(a: k.InOut[k.f32, 1], b: k.InOut[k.f32, 1], ctx: k.Context):
    for i in ctx.parallel(a.shape[0]):
        kept = a[i]
        a[i] = b[i]
        b[i] = kept


def matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal((rows, columns)).astype(np.float32)


def f32(*shape: int) -> TensorType:
    return TensorType(DType.float32, shape, REF)


def scaled(x: Any, factor: float, shape: tuple[int, ...]) -> Tensor:
    return F.custom("eager.scale", CPU(), [x], [f32(*shape)], {"factor": factor})[0]


def test_a_custom_op_is_recorded_and_fuses_into_one_program(rng: np.random.Generator) -> None:
    a = matrix(rng, 7, 3)
    x = Tensor.from_dlpack(a)
    before = compiled_programs()
    y = F.tanh(scaled(x + 1, 2.5, (7, 3)) - x)
    assert not y.real and compiled_programs() == before
    np.testing.assert_allclose(y.to_numpy(), np.tanh((a + 1) * 2.5 - a), rtol=1e-5, atol=1e-6)
    assert compiled_programs() == before + 1


def test_sizes_of_a_custom_op_that_vary_become_symbols(rng: np.random.Generator) -> None:
    counts: list[int] = []
    for rows in (2, 5, 9, 4, 11, 0, 17, 1, 23):
        a = matrix(rng, rows, 3)
        np.testing.assert_array_equal(
            scaled(Tensor.from_dlpack(a), 3.0, (rows, 3)).to_numpy(), a * np.float32(3)
        )
        counts.append(compiled_programs())
    assert counts[-1] - counts[2] <= 1, "the sizes are symbols from the third call on"
    for factor in (1.0, 2.0, -0.0, 0.0, 7.5, 9.0):
        got = scaled(Tensor.from_dlpack(a), factor, (23, 3)).to_numpy()
        np.testing.assert_array_equal(got, a * np.float32(factor))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(a * np.float32(factor)))


def test_a_kernel_that_is_registered_again_replaces_the_first(rng: np.random.Generator) -> None:
    a = matrix(rng, 3, 5)

    def define(amount: int) -> None:
        @k.register("eager.shift")
        def shift(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], ctx: k.Context):
            for i in ctx.parallel(x.shape[0]):
                for j in range(x.shape[1]):
                    out[i, j] = x[i, j] + amount

    for amount in (1, 2, 3):
        define(amount)
        for _ in range(3):
            got = F.custom("eager.shift", CPU(), [Tensor.from_dlpack(a)], [f32(3, 5)])[0]
            np.testing.assert_array_equal(got.to_numpy(), a + np.float32(amount))


def test_writes_are_those_of_the_compiled_graph(rng: np.random.Generator) -> None:
    with Graph("sum", input_types=[BufferType(DType.float32, ["n", 3], REF), f32(5, 3)]) as graph:
        total, x = graph.inputs[0].buffer, graph.inputs[1].tensor
        ops.inplace_custom("eager.accumulate", REF, [total, x], parameters={"times": 3})
        graph.output()
    model = InferenceSession().load(graph)
    a, b = matrix(rng, 5, 3), matrix(rng, 5, 3)
    eager = Tensor.from_dlpack(a.copy())
    compiled = a.copy()
    want = a.copy()
    for _ in range(4):
        assert (
            F.inplace_custom(
                "eager.accumulate", CPU(), [eager, Tensor.from_dlpack(b)], parameters={"times": 3}
            )
            == []
        )
        model.execute(compiled, b)
        want += 3 * b[::-1]
        np.testing.assert_array_equal(eager.to_numpy(), compiled)
    np.testing.assert_allclose(eager.to_numpy(), want, rtol=1e-5, atol=1e-5)


def add(total: Tensor, x: Any, times: int = 1) -> None:
    F.inplace_custom("eager.accumulate", CPU(), [total, x], parameters={"times": times})


def test_what_was_recorded_before_sees_the_elements_before(rng: np.random.Generator) -> None:
    a, b = matrix(rng, 4, 3), matrix(rng, 4, 3)
    memory = a.copy()
    for _ in range(4):  # a trace is followed from the third time on
        memory[...] = a
        x, y = Tensor.from_dlpack(memory), Tensor.from_dlpack(b)
        alias, copied, row = copy.copy(x), copy.deepcopy(x), x[1]
        before = x * 2
        add(x, before + y)
        after = x * 2
        want = a + (2 * a + b)[::-1]
        np.testing.assert_allclose(after.to_numpy(), 2 * want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(before.to_numpy(), 2 * a)
        np.testing.assert_array_equal(row.to_numpy(), a[1])
        np.testing.assert_array_equal(copied.to_numpy(), a)
        np.testing.assert_allclose(alias.to_numpy(), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(memory, alias.to_numpy())


def test_a_pending_tensor_is_computed_and_written(rng: np.random.Generator) -> None:
    a = matrix(rng, 6, 2)
    x = Tensor.from_dlpack(a)
    y = x * 2
    z = y + 1
    add(y, x, 5)
    np.testing.assert_allclose(y.to_numpy(), 2 * a + 5 * a[::-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(z.to_numpy(), 2 * a + 1)
    np.testing.assert_allclose((y + 1).to_numpy(), y.to_numpy() + 1)


def test_an_operand_on_the_same_memory_is_read_as_before(rng: np.random.Generator) -> None:
    a = matrix(rng, 5, 3)
    for second in (lambda x, _: x, lambda x, m: Tensor.from_dlpack(m), lambda x, _: copy.copy(x)):
        memory = a.copy()
        x = Tensor.from_dlpack(memory)
        add(x, second(x, memory))
        np.testing.assert_array_equal(x.to_numpy(), a + a[::-1])
    # rows that overlap in part
    memory = np.concatenate([a, a])
    add(Tensor.from_dlpack(memory[:5]), Tensor.from_dlpack(memory[3:8]))
    np.testing.assert_array_equal(memory[:5], a + np.concatenate([a, a])[3:8][::-1])


def test_arrays_and_numbers_are_read(rng: np.random.Generator) -> None:
    a, b = matrix(rng, 3, 3), matrix(rng, 3, 3)
    x = Tensor.from_dlpack(a.copy())
    want = a.copy()
    for factor in (1, 2, 3):
        array = b * factor
        add(x, array)
        want += array[::-1]
        array[...] = 0
        np.testing.assert_array_equal(x.to_numpy(), want)


def test_results_and_errors_of_the_kernel() -> None:
    stack = Tensor.from_dlpack(np.arange(1, 8))
    out = [TensorType(DType.int64, [3], REF)]
    (taken,) = F.inplace_custom("eager.pop", CPU(), [stack], out)
    np.testing.assert_array_equal(taken.to_numpy(), [1, 2, 3])
    np.testing.assert_array_equal(stack.to_numpy(), [-1, -2, -3, 4, 5, 6, 7])
    with pytest.raises(OverflowError, match="was taken before") as raised:
        F.inplace_custom("eager.pop", CPU(), [stack], out)
    assert "test_custom_ops.py" in str(raised.value)
    np.testing.assert_array_equal(taken.to_numpy(), [1, 2, 3])


def test_sizes_of_writes_that_vary_become_symbols(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    original = module._compile_call
    monkeypatch.setattr(
        module, "_compile_call", lambda *args: compiled.append(args) or original(*args)
    )
    for rows in (2, 5, 9, 4, 11, 0, 17, 1, 23):
        a, b = matrix(rng, rows, 7), matrix(rng, rows, 7)
        x = Tensor.from_dlpack(a.copy())
        add(x, Tensor.from_dlpack(b), 4)
        np.testing.assert_allclose(x.to_numpy(), a + 4 * b[::-1], rtol=1e-5, atol=1e-5)
    assert len(compiled) <= 4
    for times in (1, 2, 3, 4, 5):
        x = Tensor.from_dlpack(a.copy())
        add(x, Tensor.from_dlpack(b), times)
        np.testing.assert_allclose(x.to_numpy(), a + times * b[::-1], rtol=1e-5, atol=1e-5)


def test_two_written_operands() -> None:
    a, b = np.arange(4, dtype=np.float32), np.arange(4, 8, dtype=np.float32)
    x, y = Tensor.from_dlpack(a), Tensor.from_dlpack(b)
    F.inplace_custom("eager.swap", CPU(), [x, y])
    np.testing.assert_array_equal(x.to_numpy(), np.arange(4, 8))
    np.testing.assert_array_equal(y.to_numpy(), np.arange(4))
    with pytest.raises(ValueError, match="share memory"):
        F.inplace_custom("eager.swap", CPU(), [x, x])


def test_files(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "doubling.py").write_text(
        "from max import kernel as k\n\n"
        '@k.register("eager.doubled")\n'
        "def doubled(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], ctx: k.Context):\n"
        "    for i in ctx.parallel(x.shape[0]):\n"
        "        for j in range(x.shape[1]):\n"
        "            out[i, j] = 2 * x[i, j]\n\n"
        '@k.register("eager.double")\n'
        "def double(x: k.InOut[k.f32, 2], ctx: k.Context):\n"
        "    for i in ctx.parallel(x.shape[0]):\n"
        "        for j in range(x.shape[1]):\n"
        "            x[i, j] = 2 * x[i, j]\n"
    )
    a = matrix(rng, 3, 4)
    x = Tensor.from_dlpack(a.copy())
    with pytest.raises(NameError, match=r"no kernel is registered as 'eager\.doubled'"):
        F.custom("eager.doubled", CPU(), [x], [f32(3, 4)])
    for paths in (tmp_path, [str(tmp_path / "doubling.py")]):
        (got,) = F.custom("eager.doubled", CPU(), [x], [f32(3, 4)], custom_extensions=paths)
        np.testing.assert_array_equal(got.to_numpy(), 2 * a)
    F.inplace_custom("eager.double", CPU(), [x], custom_extensions=tmp_path)
    np.testing.assert_array_equal(x.to_numpy(), 2 * a)
    for function in (F.custom, F.inplace_custom):
        with pytest.raises(FileNotFoundError, match=r"missing\.py"):
            function(
                "eager.doubled", CPU(), [x], [f32(3, 4)], custom_extensions=tmp_path / "missing.py"
            )


def test_calls_that_do_not_fit(rng: np.random.Generator) -> None:
    a = matrix(rng, 3, 4)
    x = Tensor.from_dlpack(a)
    frozen = a.copy()
    frozen.setflags(write=False)
    with pytest.raises(NameError, match=r"did you mean 'eager\.accumulate'"):
        F.inplace_custom("eager.acumulate", CPU(), [x, x])
    with pytest.raises(TypeError, match="x has dtype f32, got i32"):
        add(x, x.cast(DType.int32))
    with pytest.raises(TypeError, match="x has dtype f32, got i32"):
        scaled(x.cast(DType.int32), 1.0, (3, 4))
    with pytest.raises(TypeError, match="total has dtype f32, got i32"):
        add(Tensor.from_dlpack(a.astype(np.int32)), x)
    with pytest.raises(TypeError, match="x has rank 2, got 1"):
        add(x, x[0])
    for values in ([x], [x, x, x], []):
        with pytest.raises(TypeError, match=r"accumulate|buffer"):
            F.inplace_custom("eager.accumulate", CPU(), values, parameters={"times": 1})
    with pytest.raises(TypeError, match="times"):
        F.inplace_custom("eager.accumulate", CPU(), [x, x])
    with pytest.raises(TypeError, match=r"expected a bool, an int, a float"):
        F.inplace_custom("eager.accumulate", CPU(), [x, x], parameters={"times": [1]})
    with pytest.raises(TypeError, match="operand 0 is array"):
        add(a, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="at least one buffer"):
        F.inplace_custom("eager.scale", CPU(), [x], [f32(3, 4)], {"factor": 1.0})
    with pytest.raises(TypeError, match="cannot be written"):
        F.custom("eager.accumulate", CPU(), [x, x], [], {"times": 1})
    before = frozen.copy()
    written = Tensor.from_dlpack(frozen)
    add(written, x)
    np.testing.assert_array_equal(frozen, before)
    assert (written.to_numpy() != before).any()
    np.testing.assert_array_equal(x.to_numpy(), a)
    np.testing.assert_array_equal(frozen, a)


def test_in_a_graph(rng: np.random.Generator) -> None:
    a, b = matrix(rng, 4, 3), matrix(rng, 4, 3)
    held = Tensor.from_dlpack(b)
    with Graph("g", input_types=[BufferType(DType.float32, [4, 3], REF), f32(4, 3)]) as graph:
        total, x = (Tensor.from_graph_value(value) for value in graph.inputs)
        doubled = scaled(x, 2.0, (4, 3))
        add(total, doubled, 2)
        add(total, held)
        with pytest.raises(TypeError, match="at least one buffer"):
            add(x, doubled)
        graph.output(scaled(held, 3.0, (4, 3)).__tensorvalue__())
    memory = a.copy()
    (got,) = InferenceSession().load(graph).execute(memory, b)
    np.testing.assert_allclose(memory, a + 4 * b[::-1] + b[::-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.to_numpy(), b * np.float32(3))


def test_in_a_compiled_module(rng: np.random.Generator) -> None:
    class Scaled(Module):
        def __call__(self, x: Tensor) -> Tensor:
            return scaled(x, 0.5, (4, 3)) + 1

    a = matrix(rng, 4, 3)
    compiled = Scaled().compile(f32(4, 3))
    np.testing.assert_array_equal(
        compiled(Tensor.from_dlpack(a)).to_numpy(), Scaled()(Tensor.from_dlpack(a)).to_numpy()
    )
