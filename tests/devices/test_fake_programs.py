"""Branches, loops, buffers, effects, errors and collectives of programs that run on the CPU and on other devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max._backends.cpu.kernels.library import CPU_KERNELS
from max._backends.kernel_library import KernelLibrary
from max.driver import CPU, Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from tests.devices import fake
from tests.devices.mixed import HOST, ONE, TWO, arrays, compare, devices, floats, on

F32, I64 = DType.float32, DType.int64
__all__ = ["devices"]


def mixed_session(devices: list[Device]) -> InferenceSession:
    return InferenceSession(devices=[CPU(), *devices])


def test_branches(devices: list[Device], rng: np.random.Generator) -> None:
    """The host chooses the branch; the branches run on one device or on several."""

    def forward(at: Any, flag: Any, x: Any) -> Any:
        type_ = TensorType(F32, ["n", 4], at(ONE))
        there = x.to(at(ONE))
        (one,) = ops.cond(flag, [type_], lambda: there * 2, lambda: ops.exp(there))
        (two,) = ops.cond(
            flag, [type_], lambda: (x + 1).to(at(ONE)), lambda: (there.to(at(TWO)) - 1).to(at(ONE))
        )
        return one, two.to(at(HOST)) + x

    for flag in (True, False):
        inputs = [(np.array(flag), HOST), (floats(rng, 3, 4), HOST)]
        compare(devices, forward, inputs, [[], ["n", 4]])


def test_loops(devices: list[Device], rng: np.random.Generator) -> None:
    """Carried values stay on their device; the host reads the condition from its device."""

    def forward(at: Any, count: Any, x: Any) -> Any:
        def condition(i: Any, y: Any) -> Any:
            return i < 3

        def body(i: Any, y: Any) -> Any:
            return [i + 1, ops.tanh(y) + y.to(at(HOST)).to(at(ONE)) * 0.5]

        return ops.while_loop([count, x], condition, body)

    compare(devices, forward, [(np.array(0, np.int64), HOST), (floats(rng, 2, 5), ONE)])
    compare(devices, forward, [(np.array(5, np.int64), HOST), (floats(rng, 2, 5), ONE)])


def test_a_loop_whose_condition_has_effects(
    devices: list[Device], rng: np.random.Generator
) -> None:
    """The carried value and the buffer are on a device; the chain comes after the predicate."""
    types = [BufferType(F32, [1], ONE), TensorType(F32, [1], ONE)]
    with Graph("effects", input_types=types) as graph:
        limit, x = graph.inputs[0].buffer, graph.inputs[1].tensor

        def condition(y: Any) -> Any:
            ops.buffer_store(limit, ops.buffer_load(limit) - 1)
            return (y < ops.buffer_load(limit)).reshape([])

        (y,) = ops.while_loop([x], condition, lambda y: [y + 1])
        graph.output(y)
    held = on(devices[0], np.array([10], np.float32))
    model = mixed_session(devices).load(graph)
    (y,) = arrays(model.execute(held, on(devices[0], np.array([0], np.float32))))
    # 0 < 9, 1 < 8, … 4 < 5, and not 5 < 4
    assert y == [5] and held.to(CPU()).to_numpy() == [4]


def test_buffers(devices: list[Device], rng: np.random.Generator) -> None:
    types = [BufferType(F32, ["n", 4], ONE), TensorType(F32, ["n", 4], HOST)]
    with Graph("buffers", input_types=types) as graph:
        buffer, x = graph.inputs[0].buffer, graph.inputs[1].tensor
        before = ops.buffer_load(buffer)
        ops.buffer_store(buffer, ops.exp(x).to(ONE))
        ops.buffer_store_slice(buffer, before[:1], [slice(0, 1)])
        graph.output(before.to(HOST) - x, ops.buffer_load(buffer).to(TWO))
    model = mixed_session(devices).load(graph)
    held, x = floats(rng, 5, 4), floats(rng, 5, 4)
    there = on(devices[0], held)
    first, second = arrays(model.execute(there, x))
    want = np.concatenate([held[:1], np.exp(x)[1:]])
    np.testing.assert_allclose(first, held - x)
    np.testing.assert_allclose(second, want, 1e-6)
    np.testing.assert_allclose(there.to(CPU()).to_numpy(), want, 1e-6)
    with pytest.raises(ValueError, match=r"writes to it.*Tensor.from_numpy\(array\).to\(device\)"):
        model.execute(held, x)
    with pytest.raises(ValueError, match=r"on cpu:0; move it with .to\(device\)"):
        model.execute(Tensor.from_numpy(held), x)


def test_writing_to_another_device_is_refused(devices: list[Device]) -> None:
    types = [BufferType(F32, [4], HOST), TensorType(F32, [4], ONE)]
    with Graph("far", input_types=types) as graph:
        buffer, x = graph.inputs[0].buffer, graph.inputs[1].tensor
        ops.buffer_store(buffer, x.to(HOST))
        graph.output(x)
    assert mixed_session(devices).load(graph)
    with pytest.raises(ValueError, match=r"gpu:1"):
        InferenceSession(devices=[CPU(), devices[0]]).load(
            Graph("unknown", lambda y: y.to(TWO).to(HOST), [TensorType(F32, [4], HOST)])
        )
    with pytest.raises(ValueError, match="input 1 of far is on gpu:0, the session has cpu:0"):
        InferenceSession().load(graph)


def test_errors_of_kernels(devices: list[Device], rng: np.random.Generator) -> None:
    """A kernel raises in the queue: the caller gets the error with the line, and the device remains usable."""
    types = [TensorType(F32, [5, 3], ONE), TensorType(I64, [2], ONE)]
    with Graph("gather", input_types=types) as graph:
        x, i = (value.tensor for value in graph.inputs)
        graph.output(ops.gather(x, i, 0).to(HOST) + 1, ops.gather(x, i, 0))
    model = mixed_session(devices).load(graph)
    x = floats(rng, 5, 3)
    there = on(devices[0], x)
    for _ in range(2):
        with pytest.raises(IndexError, match=r"gather.*staged at .*test_fake_programs.py"):
            model.execute(there, on(devices[0], np.array([0, 9])))
        first, second = arrays(model.execute(there, on(devices[0], np.array([4, -1]))))
        np.testing.assert_array_equal(first, x[[4, -1]] + 1)
        np.testing.assert_array_equal(second, x[[4, -1]])


def test_an_execution_waits_for_the_queue(devices: list[Device], rng: np.random.Generator) -> None:
    """A program of one device raises the error of its own execution, not of a later one."""
    types = [TensorType(F32, [5, 3], ONE), TensorType(I64, [2], ONE)]
    with Graph("alone", input_types=types) as graph:
        x, i = (value.tensor for value in graph.inputs)
        graph.output(ops.gather(x, i, 0))
    model = mixed_session(devices).load(graph)
    with pytest.raises(IndexError, match="gather"):
        model.execute(on(devices[0], floats(rng, 5, 3)), on(devices[0], np.array([0, 9])))
    devices[0].synchronize()


def test_sizes_are_checked(devices: list[Device]) -> None:
    with Graph("cut", input_types=[TensorType(F32, ["n"], ONE)]) as graph:
        graph.output(graph.inputs[0].tensor[2:6])
    model = mixed_session(devices).load(graph)
    with pytest.raises(
        ValueError, match="slice: 2:6:1 is out of range for axis 0 of size n: n is 3"
    ):
        model.execute(on(devices[0], np.zeros(3, np.float32)))


def test_one_device_alone(devices: list[Device], rng: np.random.Generator) -> None:
    """A program on one device has one segment: it can be captured, and its temporaries share one arena."""
    with Graph("alone", input_types=[TensorType(F32, ["n", 8], ONE)] * 2) as graph:
        x, y = (value.tensor for value in graph.inputs)
        graph.output(ops.softmax(ops.cumsum(x, 1) @ ops.transpose(ops.cumsum(y, 1), 0, 1)))
    model = mixed_session(devices).load(graph)
    assert not model._compiled.later and model._compiled.main.device == 1
    x, y = floats(rng, 3, 8), floats(rng, 3, 8)
    inputs = [on(devices[0], x), on(devices[0], y)]
    captured = model.capture(1, *inputs)
    inputs[0].inplace_copy_from(on(devices[0], y))
    model.replay(1, *inputs)
    want = model.execute(*inputs)
    devices[0].synchronize()
    np.testing.assert_array_equal(*map(lambda t: t.to(CPU()).to_numpy(), (*captured, *want)))
    with model.profile() as profile:
        model.execute(*inputs)
    assert profile.runs == 1 and sum(kernel.calls for kernel in profile.kernels) >= 3
    # numbers and host arrays are copied to the device
    (from_host,) = arrays(model.execute(y, y))
    np.testing.assert_array_equal(from_host, want[0].to(CPU()).to_numpy())


def test_custom_ops_and_prints(
    devices: list[Device], rng: np.random.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    def forward(at: Any, x: Any) -> Any:
        (doubled,) = ops.custom("fake_double", at(ONE), [x], [TensorType(F32, x.shape, at(ONE))])
        ops.print(doubled.tensor, "doubled")
        return [doubled.tensor + 1]

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    compare(devices, forward, [(x, ONE)])
    shown = [line for line in capfd.readouterr().out.splitlines() if "doubled" in line]
    assert len(shown) == 4 and len(set(shown)) == 1


@fake.k.register("fake_double")
def fake_double(out: fake.k.Output, x: fake.k.Input, ctx: fake.k.Context) -> None:
    for i, j in ctx.parallel(out.shape):
        out[i, j] = x[i, j] + x[i, j]


def test_programs_with_kernels_of_the_user_are_not_kept(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom op has a kernel of the user, whatever the libraries of the devices have under its name."""
    session = mixed_session(devices)
    kinds = [TensorType(F32, [2, 3], ref) for ref in (HOST, ONE)]
    with Graph("custom", input_types=kinds) as graph:
        (y,) = ops.custom("fake_double", ONE, [graph.inputs[1]], [kinds[1]])
        graph.output(y.tensor + 1)
    with Graph("plain", input_types=kinds) as plain:
        plain.output(plain.inputs[1].tensor + 1)
    module = graph.to_mlir()
    with_symbol = KernelLibrary({**CPU_KERNELS.families, "fake_double": "indexing.gather"})
    host, device = session._backends[0], session._backends[1]
    keys = session._store
    # fake devices themselves keep no programs
    monkeypatch.setattr(keys, "_kept_devices", lambda: "devices")
    assert keys._key(plain.to_mlir(), ["x", "y"]) is not None
    for backend in (host, device):
        assert keys._key(module, ["x", "y"]) is None
        monkeypatch.setattr(backend, "library", with_symbol)
    assert keys._key(module, ["x", "y"]) is None


def test_what_follows_a_product_that_takes_no_epilogue(
    devices: list[Device], rng: np.random.Generator
) -> None:
    """Its launch reads the sums and the operands of both; views before the product are part of its own."""

    def forward(at: Any, x: Any, y: Any) -> Any:
        square = ops.reshape(x, [4, 4])
        return ops.tanh(square @ y) + square, ops.exp(y @ ops.reshape(x, [4, 4])) * y

    compare(devices, forward, [(floats(rng, 2, 8), ONE), (floats(rng, 4, 4), ONE)])


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("mo.argsort", lambda x: ops.argsort(x[0])),
        ("mo.matmul", lambda x: x @ x),
        ("mo.matmul", lambda x: ops.exp(x @ x)),
    ],
    ids=["argsort", "matmul", "matmul with an epilogue"],
)
def test_an_op_without_a_kernel_on_its_device(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch, kernel: str, op: Any
) -> None:
    session = mixed_session(devices)
    families = session._backends[1].library.families
    without = KernelLibrary({name: f for name, f in families.items() if name != kernel})
    monkeypatch.setattr(session._backends[1], "library", without)
    session.load(Graph("host", lambda x: op(x.tensor), [TensorType(F32, [3, 3], HOST)]))
    graph = Graph("device", lambda x: op(x.tensor), [TensorType(F32, [3, 3], ONE)])
    with pytest.raises(NotImplementedError, match=r"the compiler has no kernel for this op on .*3"):
        session.load(graph)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.int32], ids=str)
def test_collectives(devices: list[Device], rng: np.random.Generator, dtype: DType) -> None:
    """Allreduce and allgather over two CPU devices and two fake ones."""
    where = [HOST, ONE, DeviceRef.CPU(1), TWO]
    real = [CPU(), devices[0], CPU(1), devices[1]]
    types: list[Any] = [TensorType(dtype, ["n", 6], ref) for ref in where]
    types += [BufferType(DType.uint8, [16], ref) for ref in where]
    with Graph("collectives", input_types=types) as graph:
        xs = [value.tensor for value in graph.inputs[:4]]
        signals = [value.buffer for value in graph.inputs[4:]]
        sums = ops.allreduce.sum(xs, signals)
        rows = ops.allgather([x * 2 for x in xs], signals, axis=0)
        graph.output(*sums, *rows)
    model = InferenceSession(devices=[CPU(), CPU(1), *devices]).load(graph)
    given = [(rng.standard_normal((3, 6)) * 4).astype(dtype.to_numpy()) for _ in where]
    buffers = [Tensor.zeros([16], DType.uint8, device) for device in real]
    outputs = model.execute(*[on(d, x) for d, x in zip(real, given, strict=True)], *buffers)
    assert [y.device for y in outputs] == [*real, *real]
    wide = np.float32 if dtype.is_float() else np.int32
    total = np.add.reduce([x.astype(wide) for x in given]).astype(dtype.to_numpy())
    gathered = np.concatenate(given) * 2
    for ours in arrays(outputs[:4]):
        np.testing.assert_allclose(ours.astype(np.float64), total.astype(np.float64), 1e-6, 1e-6)
    for ours in arrays(outputs[4:]):
        np.testing.assert_array_equal(ours, gathered)


def test_two_workers(
    devices: list[Device], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels with barriers on a device that divides a launch between workers."""
    monkeypatch.setattr(fake.FakeBackend, "num_workers", 2)

    def forward(at: Any, x: Any) -> Any:
        return ops.softmax(x), ops.argsort(x[0]), ops.sum(x, 1).to(at(HOST))

    compare(devices, forward, [(floats(rng, 4, 70), ONE)])
