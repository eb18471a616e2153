"""A device with a grid of blocks: its geometry, its loops, its own passes and region kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from max import kernel as k
from max._backends import BackendOptions, backends_for
from max._backends.kernel_call import Geometry, KernelCall, Operand, Scalar, view
from max._backends.kernel_library import KernelLibrary
from max._backends.program import Jump
from max._compiler import mok
from max._compiler.pipeline import compile_module, optimize
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.loop import ModelLoop
from max.experimental import functional as F
from max.experimental.tensor import Tensor as EagerTensor
from max.graph import BufferType, Graph, TensorType, Weight, ops
from max.mlir import verify_module
from tests.devices.fake import fake_devices
from tests.devices.grid import FAKE_KERNELS, ROWS, WORKERS, GridBackend, GridDevice, grid_devices
from tests.devices.mixed import HOST, ONE, arrays, compare, floats, on

F32, I64 = DType.float32, DType.int64


@pytest.fixture
def devices() -> Iterator[list[GridDevice]]:
    with grid_devices(2) as found:
        yield found


def backend_of(session: InferenceSession) -> GridBackend:
    return cast(GridBackend, session._backends[1])


# launches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, ROWS, 10])
def test_a_region_has_a_block_for_some_rows(devices: Any, rng: Any, rows: int) -> None:
    session = InferenceSession(devices=[CPU(), devices[0]])
    with Graph("rows", input_types=[TensorType(F32, ["n", 7], ONE)]) as graph:
        graph.output(ops.softmax(graph.inputs[0].tensor * 2))
    model = session.load(graph)
    (launch,) = model._compiled.main.launches
    assert launch.geometry is not None and launch.geometry.block == (WORKERS,)
    x = floats(rng, rows, 7)
    (y,) = arrays(model.execute(on(devices[0], x)))
    want = np.exp(2 * x) / np.exp(2 * x).sum(1, keepdims=True)
    np.testing.assert_allclose(y, want, 1e-5, 1e-6)
    assert backend_of(session).blocks == -(-rows // ROWS)


def test_the_blocks_of_a_call(devices: Any, rng: Any) -> None:
    """Their number is computed with the caller's sizes."""
    with Graph("calls", input_types=[TensorType(F32, ["n", 3], ONE)]) as graph:
        sub = graph.add_subgraph("sub", lambda x: ops.softmax(x), [TensorType(F32, ["m", 3], ONE)])
        x = graph.inputs[0].tensor
        graph.output(ops.call(sub, ops.concat([x, x, x]))[0].tensor)
    session = InferenceSession(devices=[CPU(), devices[0]])
    x = floats(rng, 4, 3)
    (y,) = arrays(session.load(graph).execute(on(devices[0], x)))
    rows = np.exp(np.concatenate([x, x, x]))
    np.testing.assert_allclose(y, rows / rows.sum(1, keepdims=True), 1e-5)


@k.kernel
def reversed_in_blocks(
    out: k.Output,
    x: k.Input,
    block: k.i64,  # pyright: ignore[reportInvalidTypeForm]
    ctx: k.Context,
) -> None:
    """Reverses each 8 elements: the workers of a block write, meet, and swap."""
    for (i,) in ctx.parallel((8,)):
        out[block * 8 + i] = x[block * 8 + i]
    ctx.barrier()
    for (i,) in ctx.parallel((4,)):
        first = out[block * 8 + i]
        out[block * 8 + i] = out[block * 8 + 7 - i]
        out[block * 8 + 7 - i] = first


def lower_reversed(operands: Any, results: Any, attributes: Any, target: Any) -> KernelCall:
    (x,) = cast("list[Operand]", operands)
    args = (view("result", 0, results[0], static=False), view("operand", 0, x, static=False))
    geometry = Geometry((x.shape[0] // 8,), (WORKERS,), shared_bytes=64)
    return KernelCall(reversed_in_blocks, (*args, Scalar(0)), geometry=geometry)


def test_a_library_kernel_has_a_geometry(devices: Any, monkeypatch: Any) -> None:
    """A barrier holds the workers of its block; the number of blocks follows from the sizes of an execution."""
    session = InferenceSession(devices=[CPU(), devices[0]])
    library = KernelLibrary({**FAKE_KERNELS.families, "mo.argsort": lower_reversed})
    monkeypatch.setattr(backend_of(session), "library", library)
    with Graph("blocks", input_types=[TensorType(I64, ["n"], ONE)]) as graph:
        graph.output(ops.argsort(graph.inputs[0].tensor))
    model = session.load(graph)
    (launch,) = model._linked.main.executor.program.launches  # type: ignore[union-attr]
    assert launch.geometry is not None and launch.geometry.shared_bytes == 64
    for blocks in (0, 1, 5):
        x = np.arange(8 * blocks, dtype=np.int64)
        (y,) = arrays(model.execute(on(devices[0], x)))
        np.testing.assert_array_equal(y, x.reshape(-1, 8)[:, ::-1].reshape(-1))
    assert backend_of(session).blocks == 6


# passes ------------------------------------------------------------------------------------------


def test_the_pass_of_a_backend(devices: Any, rng: Any) -> None:
    """It changes the products of its device only; the transpose of a weight is copied at load."""
    weights = {"a": floats(rng, 40, 40), "b": floats(rng, 40, 48)}

    def forward(at: Any, x: Any) -> Any:
        a, b = Weight("a", F32, [40, 40], at(ONE)), Weight("b", F32, [40, 48], HOST)
        y = x @ a
        return y, y.to(at(HOST)) @ b

    inputs = [(floats(rng, 3, 40), ONE)]
    model = compare(devices, forward, inputs, weights=weights, tolerance=1e-5)
    names = [launch.name for code in model._compiled.once for launch in code.launches]
    assert sorted(names) == ["mark", "pack", "transpose"]


# loops -------------------------------------------------------------------------------------------


def looped(at: Any, count: Any, x: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        (z,) = ops.cond(
            (i % 2) == 0, [y.type], lambda: ops.tanh(y) * 2, lambda: ops.cumsum(y, 1) * 0.5
        )
        return [i + 1, z]

    return ops.while_loop([count, x], lambda i, y: i < 5, body)


def test_a_loop_runs_on_the_device(devices: Any, rng: Any) -> None:
    """With its predicate and all launches there, the program is one segment, with jumps."""
    for start in (0, 3, 9):
        inputs = [(np.array(start, np.int64), ONE), (floats(rng, 2, 5), ONE)]
        model = compare(devices, looped, inputs)
        assert not model._compiled.later
        kinds = {launch.jump for launch in model._compiled.main.launches}
        assert {"if_zero", "back"} <= kinds


def test_the_host_drives_a_loop_over_two_devices(devices: Any, rng: Any) -> None:
    inputs = [(np.array(1, np.int64), HOST), (floats(rng, 2, 5), ONE)]
    model = compare(devices, looped, inputs)
    assert model._compiled.later
    assert not any(launch.jump == "back" for launch in model._compiled.main.launches)


def test_a_branch_of_the_host_inside_one_of_the_device(devices: Any, rng: Any) -> None:
    """The host drives both: a device does not wait for the host between two launches."""

    def forward(at: Any, outer: Any, inner: Any, x: Any) -> Any:
        def first() -> Any:
            return ops.cond(inner, [x.type], lambda: ops.exp(x), lambda: x * 3)[0] + 1

        return ops.cond(outer, [x.type], first, lambda: x * 2)

    for outer in (True, False):
        for inner in (True, False):
            flags = [(np.array(outer), ONE), (np.array(inner), HOST)]
            model = compare(devices, forward, [*flags, (floats(rng, 2, 3), ONE)])
            assert model._compiled.later


@pytest.mark.parametrize(("kind", "jumps"), [(fake_devices, False), (grid_devices, True)])
def test_only_devices_that_run_jumps_get_them(kind: Any, jumps: bool) -> None:
    with kind(1) as found:
        backends = backends_for(found, BackendOptions())
        module = mok.parse(
            """builtin.module {
            mo.subgraph @one(%x: !mo.tensor<[3], f32, gpu:0>) -> (!mo.tensor<[3], f32, gpu:0>) {
                %y = mo.neg(%x) : (!mo.tensor<[3], f32, gpu:0>) -> !mo.tensor<[3], f32, gpu:0>
                mo.output(%y) : (!mo.tensor<[3], f32, gpu:0>) -> () }
            mo.graph @g(%p: !mo.tensor<[], bool, gpu:0>, %x: !mo.tensor<[3], f32, gpu:0>)
                    -> (!mo.tensor<[3], f32, gpu:0>) {
                %y = mo.if(%p, %x) {otherwise = @one, then = @one}
                    : (!mo.tensor<[], bool, gpu:0>, !mo.tensor<[3], f32, gpu:0>) -> !mo.tensor<[3], f32, gpu:0>
                mo.output(%y) : (!mo.tensor<[3], f32, gpu:0>) -> () } }"""
        )
        compiled, _ = compile_module(module, ["p", "x"], backends)
        assert (not compiled.later) is jumps


def test_a_condition_that_is_also_called_returns_its_predicate_on_the_cpu() -> None:
    number, flag = "!mo.tensor<[], si64, gpu:0>", "!mo.tensor<[], bool, cpu:0>"
    there = "!mo.tensor<[], bool, gpu:0>"
    with grid_devices(1) as found:
        backends = backends_for(found, BackendOptions())
        module = mok.parse(
            f"""builtin.module {{
            mo.subgraph @less(%i: {number}) -> ({flag}) {{
                %p = mo.greater(%i, %i) : ({number}, {number}) -> {there}
                %q = mo.transfer(%p) : ({there}) -> {flag}
                mo.output(%q) : ({flag}) -> () }}
            mo.subgraph @next(%i: {number}) -> ({number}) {{
                %j = mo.neg(%i) : ({number}) -> {number}
                mo.output(%j) : ({number}) -> () }}
            mo.graph @g(%i: {number}) -> ({number}, {flag}) {{
                %j = mo.while(%i) {{body = @next, condition = @less}} : ({number}) -> {number}
                %q = mo.call(%j) {{callee = @less, prefix = ""}} : ({number}) -> {flag}
                mo.output(%j, %q) : ({number}, {flag}) -> () }} }}"""
        )
        verify_module(module)
        optimize(module, backends, "place-operands")
        verify_module(module)


def test_checks_in_branches_run_on_the_device(devices: Any, rng: Any) -> None:
    with Graph(
        "cut", input_types=[TensorType(DType.bool, [], ONE), TensorType(F32, ["n"], ONE)]
    ) as graph:
        flag, x = (value.tensor for value in graph.inputs)
        (y,) = ops.cond(flag, [TensorType(F32, [4], ONE)], lambda: x[2:6] * 2, lambda: x[:4] * 1)
        graph.output(y)
    model = InferenceSession(devices=[CPU(), devices[0]]).load(graph)
    assert not model._compiled.later
    x = floats(rng, 5)
    (y,) = arrays(model.execute(on(devices[0], np.array(False)), on(devices[0], x)))
    np.testing.assert_array_equal(y, x[:4])
    with pytest.raises(ValueError, match="slice: 2:6:1 is out of range.*n is 5|5.*6"):
        model.execute(on(devices[0], np.array(True)), on(devices[0], x))


def test_a_loop_over_two_models(devices: Any, rng: Any) -> None:
    """`ModelLoop` joins two programs of the device: y = 2 x; x = y - 1, until the counter ends."""
    session = InferenceSession(devices=[CPU(), devices[0]])
    with Graph("body", input_types=[BufferType(F32, [3], ONE)]) as body:
        graph_x = body.inputs[0].buffer
        body.output(ops.buffer_load(graph_x) * 2)
    kinds: list[Any] = [TensorType(F32, [3], ONE), BufferType(F32, [3], ONE)]
    kinds += [BufferType(I64, [1], ONE), BufferType(DType.uint8, [1], ONE)]
    with Graph("after", input_types=kinds) as after:
        y, x, left, again = after.inputs
        ops.buffer_store(x.buffer, y.tensor - 1)
        count = ops.buffer_load(left.buffer) - 1
        ops.buffer_store(left.buffer, count)
        ops.buffer_store(again.buffer, (count > 0).cast(DType.uint8))
        after.output()
    models = [session.load(graph) for graph in (body, after)]
    assert all(ModelLoop.supports(model) for model in models)
    assert ModelLoop.runs_on(session, devices[0])
    # both share memory with the host while they run
    for device in (CPU(), devices[0]):
        assert ModelLoop.runs_on(session, device, with_shared_memory=True)
    with pytest.raises(ValueError, match="the graph uses gpu:1, the session has cpu, gpu:0"):
        ModelLoop.runs_on(session, devices[1])
    loop = ModelLoop(*models)
    start = floats(rng, 3)
    x, left = on(devices[0], start), on(devices[0], np.array([4], np.int64))
    again = on(devices[0], np.zeros(1, np.uint8))
    outputs = loop.run([x], lambda outputs: [outputs[0], x, left, again], again)
    want, last = start, start
    for _ in range(4):
        want, last = 2 * want - 1, 2 * want
    np.testing.assert_allclose(arrays([x])[0], want, 1e-6, 1e-6)
    np.testing.assert_allclose(arrays(outputs)[0], last, 1e-6, 1e-6)
    # the device has a loop of its own
    assert backend_of(session).turns == 4
    shared = loop.share(I64, (2, 3))
    assert shared is not None
    tensor, array = shared
    array[:] = [[1, 2, 3], [4, 5, 6]]
    assert arrays([tensor])[0].tolist() == array.tolist() and tensor.device is devices[0]
    host = Tensor.from_numpy(np.zeros(1, np.uint8))
    with pytest.raises(TypeError, match=r"again is .*expected uint8\[1\] on .*gpu"):
        loop.run([x], lambda outputs: [outputs[0], x, left, again], host)


def test_a_loop_with_the_jumps_of_the_device(devices: Any, rng: Any, monkeypatch: Any) -> None:
    """The default of the interface joins both programs; their values, also of grids, keep their meaning."""
    monkeypatch.delattr(GridBackend, "loop")
    session = InferenceSession(devices=[CPU(), devices[0]])
    with Graph("body", input_types=[TensorType(F32, ["n", 3], ONE)]) as body:
        body.output(ops.softmax(body.inputs[0].tensor))
    kinds: list[Any] = [TensorType(F32, ["n", 3], ONE), BufferType(F32, ["n", 3], ONE)]
    kinds += [BufferType(I64, [1], ONE), BufferType(DType.uint8, [1], ONE)]
    with Graph("after", input_types=kinds) as after:
        y, x, left, again = after.inputs
        ops.buffer_store(x.buffer, y.tensor * 2)
        count = ops.buffer_load(left.buffer) - 1
        ops.buffer_store(left.buffer, count)
        ops.buffer_store(again.buffer, (count > 0).cast(DType.uint8))
        after.output()
    loop = ModelLoop(session.load(body), session.load(after))
    start = floats(rng, 7, 3)
    x, left = on(devices[0], start), on(devices[0], np.array([3], np.int64))
    again = on(devices[0], np.zeros(1, np.uint8))
    (y,) = arrays(loop.run([x], lambda outputs: [outputs[0], x, left, again], again))
    want = start
    for _ in range(3):
        rows = np.exp(want)
        last = rows / rows.sum(1, keepdims=True)
        want = 2 * last
    np.testing.assert_allclose(y, last, 1e-5)
    np.testing.assert_allclose(arrays([x])[0], want, 1e-5)
    jumps = [item.kind for item in loop._joined.executor.program.launches if isinstance(item, Jump)]
    assert jumps[-2:] == ["if_zero", "back"] and backend_of(session).turns == 0


@pytest.mark.parametrize("has_loop", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_which_loops_a_device_runs(
    devices: Any, monkeypatch: Any, has_loop: bool, shares: bool
) -> None:
    monkeypatch.setattr(GridBackend, "has_loop", has_loop)
    if not shares:
        monkeypatch.delattr(
            GridBackend, "share"
        )  # the default: no memory of the host, none to share
    session = InferenceSession(devices=[CPU(), devices[0]])
    assert ModelLoop.runs_on(session, devices[0]) is has_loop
    assert ModelLoop.runs_on(session, devices[0], with_shared_memory=True) is (has_loop and shares)


def test_an_error_in_a_loop_over_two_models(devices: Any, rng: Any) -> None:
    """The run that meets it raises it, although the device has a queue."""
    session = InferenceSession(devices=[CPU(), devices[0]])
    types = [TensorType(F32, [3, 2], ONE), TensorType(I64, [1], ONE)]
    with Graph("body", input_types=types) as body:
        graph_x, index = (value.tensor for value in body.inputs)
        body.output(ops.gather(graph_x, index, 0))
    kinds: list[Any] = [TensorType(F32, [1, 2], ONE), BufferType(DType.uint8, [1], ONE)]
    with Graph("after", input_types=kinds) as after:
        ops.buffer_store(
            after.inputs[1].buffer, ops.constant(np.zeros(1, np.uint8), DType.uint8, ONE)
        )
        after.output()
    loop = ModelLoop(session.load(body), session.load(after))
    again, x = on(devices[0], np.zeros(1, np.uint8)), on(devices[0], floats(rng, 3, 2))
    with pytest.raises(IndexError, match="gather"):
        loop.run([x, on(devices[0], np.array([9]))], lambda outputs: [outputs[0], again], again)
    loop.run([x, on(devices[0], np.array([1]))], lambda outputs: [outputs[0], again], again)


# programs of users -------------------------------------------------------------------------------


def test_eager_tensors(devices: Any, rng: Any) -> None:
    x, w = floats(rng, 5, 6), floats(rng, 6, 4)

    def program(device: Any) -> Any:
        a = EagerTensor.from_dlpack(x).to(device)
        b = EagerTensor.from_dlpack(w).to(device)
        y = F.softmax(F.tanh(a @ b) + 1.0)
        total = F.sum(y, axis=0)
        return (y - total).to(CPU()).to_numpy()

    expected = program(CPU())
    devices[0].queue.launches.clear()
    np.testing.assert_allclose(program(devices[0]), expected, 1e-5, 1e-6)
    assert devices[0].queue.launches
