"""What launches of library kernels say of their arguments: reads, writes, parts, strides and operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from max import kernel as k
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.regions import nest
from max._compiler.lowering.kernel_tables import Argument
from max._compiler.lowering.library_lowering import plain
from max._compiler.lowering.lowered_graph import Launch
from max._compiler.lowering.placing import Placing
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.mlir import DimExpr
from max.nn.kernels.recurrence import causal_conv_ragged

DEVICE = DeviceRef.CPU()
F32 = DType.float32


class Recorded(NamedTuple):
    """A launch, its tensor arguments, and whether it writes each."""

    launch: Launch
    arguments: list[Argument]
    written: list[bool]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Recorded]]:
    """The launches of the graphs that the test loads, by name."""
    recorded: dict[str, list[Recorded]] = {}
    launch = Placing.launch

    def record(
        placing: Placing, kernel: Any, arguments: Any, written: Any, *rest: Any, **options: Any
    ) -> None:
        launch(placing, kernel, arguments, written, *rest, **options)
        made = placing.launches[-1]
        assert isinstance(made, Launch)
        recorded.setdefault(made.name, []).append(Recorded(made, list(arguments), list(written)))

    monkeypatch.setattr(Placing, "launch", record)
    return recorded


def tensors(graph: Graph) -> list[TensorValue]:
    return [value.tensor for value in graph.inputs]


def load(graph: Graph, **weights: np.ndarray) -> None:
    InferenceSession(devices=[CPU()]).load(graph, weights_registry=weights)


def buffers(arguments: list[Argument]) -> list[int]:
    return [argument.pointer.buffer for argument in arguments]


def test_attention(launches: dict[str, list[Recorded]]) -> None:
    """Only the results are written, and only the stride of each last axis is part of the code."""
    shapes = [("b", 4, "q", 16), ("b", 4, "n", 16), ("b", 4, "n", 24)]
    with Graph("attention", input_types=[TensorType(F32, s, DEVICE) for s in shapes]) as graph:
        q, keys, values = tensors(graph)
        graph.output(ops.softmax(q @ keys.transpose(2, 3)) @ values)
    load(graph)
    ((launch, arguments, written),) = launches["attention"]
    assert written[:4] == [True, False, False, False] and all(written[4:])
    assert buffers(arguments)[:1] == [b for b in launch.writes if b in buffers(arguments)[:1]]
    assert set(buffers(arguments)[1:4]) == {*launch.reads} and len(launch.reads) == 3
    for argument in arguments:
        rank = len(argument.view.shape)
        assert argument.static_strides == (False,) * (rank - 1) + (True,)
    assert all(argument.view.strides is not None for argument in arguments[:4])


def test_weights_that_are_packed_into_one_buffer(launches: dict[str, list[Recorded]]) -> None:
    """Each writes a part of it, from its own offset on."""
    with Graph("packed", input_types=[TensorType(F32, ("n", 64), DEVICE)]) as graph:
        (x,) = tensors(graph)
        weights = [Weight(f"w{i}", F32, (96, 64), DEVICE) for i in range(3)]
        graph.output(*[x @ w.T for w in weights])
    load(graph, **{f"w{i}": np.ones((96, 64), np.float32) for i in range(3)})
    packs = launches["pack"]
    assert len(packs) == 3
    (buffer,) = {pack.launch.writes for pack in packs}
    assert [pack.launch.parts for pack in packs] == [buffer] * 3
    assert [pack.arguments[0].view.shape for pack in packs] == [(3, 64 * COLUMNS)] * 3
    offsets = [pack.arguments[0].pointer.offset for pack in packs]
    assert offsets == [0, 96 * 64 * F32.size_in_bytes, 2 * 96 * 64 * F32.size_in_bytes]
    assert [pack.launch.flops for pack in packs] == [0] * 3


def test_an_epilogue_reads_its_operands(launches: dict[str, list[Recorded]]) -> None:
    shapes = [("n", 64), (64, 32), ("n", 32)]
    with Graph("sum", input_types=[TensorType(F32, s, DEVICE) for s in shapes]) as graph:
        x, w, y = tensors(graph)
        graph.output(ops.tanh(x @ w + y))
    load(graph)
    ((launch, arguments, written),) = launches["matmul+add+tanh"]
    assert not written[-1] and arguments[-1].pointer.buffer in launch.reads
    assert arguments[-1].pointer.buffer not in launch.writes


def test_products_in_one_launch_take_the_memory_of_their_own_residuals(
    launches: dict[str, list[Recorded]],
) -> None:
    kinds = [TensorType(F32, (3, columns), DEVICE) for columns in (64, 96, 96)]
    with Graph("residuals", input_types=kinds) as graph:
        x, *residuals = tensors(graph)
        weights = [Weight(f"w{i}", F32, (96, 64), DEVICE) for i in range(2)]
        graph.output(*[x @ w.T + y for w, y in zip(weights, residuals, strict=True)])
    load(graph, **{f"w{i}": np.ones((96, 64), np.float32) for i in range(2)})
    ((launch, arguments, written),) = launches["packed_products+add+add"]
    results = buffers([a for a, w in zip(arguments, written, strict=True) if w][:2])
    assert launch.in_place == tuple(zip(results, buffers(arguments[-2:]), strict=True))
    assert launch.flops == 2 * (2 * 3 * 64 * 96 + 3 * 96)


def test_a_kernel_that_writes_an_operand_reads_it_too(launches: dict[str, list[Recorded]]) -> None:
    state = BufferType(F32, (3, 2, 3, 8), DEVICE)
    types = [
        TensorType(F32, ("n", 8), DEVICE),
        TensorType(F32, (4, 8), DEVICE),
        TensorType(F32, (8,), DEVICE),
    ]
    indices = [TensorType(DType.uint32, s, DEVICE) for s in (("b1",), ("b",), ("b",))]
    layer = TensorType(DType.uint32, (), DEVICE)
    with Graph("conv", input_types=[*types, *indices, state, layer]) as graph:
        x, w, bias, offsets, lengths, slots, held, index = graph.inputs
        values = [x.tensor, w.tensor, bias.tensor, offsets.tensor, lengths.tensor, slots.tensor]
        graph.output(causal_conv_ragged(*values, held.buffer, index.tensor))
    load(graph)
    ((launch, arguments, written),) = launches["causal_conv.ragged"]
    both = {*launch.reads} & {*launch.writes}
    assert both == {b for b, w in zip(buffers(arguments), written, strict=True) if w} - {
        arguments[0].pointer.buffer
    }
    assert len(both) == 1


@k.register("test_launches_add")
def add(
    y: k.Output[k.f32, 1], x: k.Input[k.f32, 1], sums: k.InOut[k.f32, 1], limits: k.Input[k.f32, 1]
):
    for i in range(x.shape[0]):
        sums[i] = sums[i] + x[i]
        y[i] = k.min(sums[i], limits[i])


def test_a_custom_kernel_writes_its_results_and_the_buffers_that_it_changes(
    launches: dict[str, list[Recorded]],
) -> None:
    kind, held = TensorType(F32, (5,), DEVICE), BufferType(F32, (5,), DEVICE)
    with Graph("add", input_types=[kind, held, held]) as graph:
        x, sums, limits = graph.inputs
        graph.output(*ops.inplace_custom("test_launches_add", DEVICE, [x, sums, limits], [kind]))
    load(graph)
    ((launch, arguments, written),) = launches["test_launches_add"]
    y, x, sums, limits = buffers(arguments)
    assert written == [True, False, True, False] and not launch.serial
    assert {*launch.writes} == {y, sums} and {*launch.reads} == {x, sums, limits}


def test_regions_fill_parts_of_a_concatenation(launches: dict[str, list[Recorded]]) -> None:
    """No other launch writes these parts, so the launches need no barrier between them."""
    types = [TensorType(F32, [3, columns], DEVICE) for columns in (4, 2, 1)]
    with Graph("parts", input_types=types) as graph:
        x, y, z = tensors(graph)
        graph.output(ops.concat([ops.exp(x), ops.tanh(y), x], axis=1), ops.sin(z))
    load(graph)
    assert set(launches) == {"exp", "tanh", "concat", "sin"}
    (whole,) = launches.pop("sin")
    assert whole.launch.parts == ()
    made = [recorded.launch for (recorded,) in launches.values()]
    assert len({launch.writes for launch in made}) == 1
    assert all(launch.writes == launch.parts for launch in made)


@pytest.mark.parametrize(
    ("shape", "serial"),
    [([2048], True), ([3000], True), ([20_000], False), ([2, 1024], True), ([3, 683], False)],
)
def test_workers_share_long_copies(
    launches: dict[str, list[Recorded]], shape: list[int], serial: bool
) -> None:
    """One short row is not cut into parts, whatever its size."""
    types = [BufferType(F32, shape, DEVICE), TensorType(F32, shape[::-1], DEVICE)]
    with Graph("copy", input_types=types) as graph:
        given = graph.inputs[1].tensor
        ops.buffer_store(graph.inputs[0].buffer, given.T if len(shape) > 1 else given)
        graph.output()
    load(graph)
    (copy,) = launches["buffer_store"]
    assert copy.launch.serial is serial
    assert copy.launch.flops == 0


def test_a_sum_that_workers_share_has_memory_of_its_own(
    launches: dict[str, list[Recorded]],
) -> None:
    with Graph("sum", input_types=[TensorType(F32, [100_000], DEVICE)]) as graph:
        graph.output(ops.sum(tensors(graph)[0]))
    load(graph)
    (reduced,) = launches["reduce_sum"]
    output, given, *parts = reduced.arguments
    assert reduced.written == [True, False] + [True] * len(parts) and parts
    assert len(set(buffers(reduced.arguments))) == 2 + len(parts)
    assert all(argument.pointer.offset == 0 for argument in (output, given, *parts))


@pytest.mark.parametrize(
    ("given", "result", "widths"),
    [
        (F32, F32, {"f32": 1}),
        (F32, DType.float64, {"f64": 1}),
        (DType.float64, F32, {"f64": 1}),
        # more lanes than two registers of f32 have would spill
        (DType.uint8, DType.uint8, {"u8": 1, "f32": 2}),
    ],
)
def test_vectors_are_as_long_as_the_widest_type_allows(
    monkeypatch: pytest.MonkeyPatch, given: DType, result: DType, widths: dict[str, int]
) -> None:
    chosen: list[int] = []
    native_width = nest.native_width

    def record(spec: Any, target: k.Target) -> int:
        width = native_width(spec, target)
        assert width == min(count * target.width(name) for name, count in widths.items())
        chosen.append(width)
        return width

    monkeypatch.setattr(nest, "native_width", record)
    with Graph("cast", input_types=[TensorType(given, [99], DEVICE)]) as graph:
        (x,) = tensors(graph)
        graph.output(ops.cast(x + x, result))
    load(graph)
    assert len(chosen) == 1


def test_static_dims_in_attributes_are_ints() -> None:
    n = DimExpr.symbol("n")
    given = {
        "sizes": (DimExpr.constant(3), n),
        "each": {"count": DimExpr.constant(4)},
        "scale": 2.0,
    }
    assert plain(given) == {"sizes": (3, n), "each": {"count": 4}, "scale": 2.0}
    assert [type(size) for size in plain(given)["sizes"]] == [int, DimExpr]
