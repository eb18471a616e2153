"""Barriers: one for each hazard and no other; programs that run out of order compute the same results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import _interpreter
from max import kernel as k
from max._backends import program
from max._compiler.lowering.lowered_graph import Buffer, Jump, Launch
from max._compiler.program.memory_plan import MemoryPlan, plan_memory
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.explain import explain_graph
from max.graph import BufferType, DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from tests.compiler.reordered import ORDERS, reorder, reordered
from tests.compiler.test_random_graphs import Builder, ExactBuilder, draw_case
from tests.sensitivity import assert_within, interpret
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()
SESSION = InferenceSession(devices=[CPU()])

# ***** the planner: one hazard each *****


def launch(
    reads: str = "",
    writes: str = "",
    serial: bool = False,
    parts: str = "",
    in_place: str = "",
    jump: Jump | None = None,
) -> Launch:
    """A launch on buffers named by letters; `in_place` is pairs of a written and a read buffer."""
    number = "abcdefgh".index
    pairs = tuple((number(pair[0]), number(pair[1])) for pair in in_place.split())
    return Launch(
        "k", (), tuple(map(number, reads)), tuple(map(number, writes)), serial, "k", pairs, tuple(map(number, parts)),
        jump,
    )  # fmt: skip


def plan(*launches: Launch, kinds: str = "tttttttt", sizes: str = "11111111", **options) -> MemoryPlan:  # fmt: skip
    kind = {"t": "temp", "i": "input", "o": "output", "w": "weight"}
    buffers = [Buffer(kind[c], 64 * int(n)) for c, n in zip(kinds, sizes, strict=True)]
    return plan_memory(buffers, list(launches), **options)


def barriers(*launches: Launch, kinds: str = "iiiiiiii", **options) -> str:
    """Marks the launches with a barrier by ``|``; `kinds` has the kinds of the buffers a, b, …"""
    return "".join(".|"[b] for b in plan(*launches, kinds=kinds, **options).barriers)


@pytest.mark.parametrize(
    ("hazard", "expected"),
    [
        # (reads, writes) of each launch
        ([("a", "b"), ("b", "c")], ".|"),  # read after write
        ([("a", "b"), ("c", "a")], ".|"),  # write after read
        ([("a", "b"), ("c", "b")], ".|"),  # write after write
        ([("a", "b"), ("a", "c")], ".."),  # two readers
        ([("a", "b"), ("c", "d")], ".."),  # no common buffer
        ([("a", "b"), ("c", "d"), ("b", "e")], "..|"),  # the writer is not the last one
        ([("a", "b"), ("c", "d"), ("e", "a")], "..|"),  # nor is the reader
        ([("a", "b"), ("b", "c"), ("b", "d")], ".|."),  # one barrier serves both readers
        ([("a", "b"), ("b", "c"), ("a", "d")], ".|."),
        ([("a", "b"), ("b", "c"), ("d", "a")], ".|."),  # the reader finished before the barrier
        ([("a", "b"), ("b", "c"), ("d", "b")], ".||"),  # b is read after the barrier
        ([("a", "b"), ("b", "c"), ("c", "d"), ("a", "b")], ".||."),
        ([("a", "a"), ("b", "c")], ".."),  # a launch does not wait for itself
        ([("a", "a"), ("a", "b")], ".|"),
        ([("a", "b"), ("c", "a"), ("a", "d")], ".||"),
        ([("ab", "c"), ("d", "e"), ("", "b")], "..|"),  # any operand
        ([("a", "bc"), ("d", "e"), ("ec", "f")], "..|"),  # any result
    ],
)
@pytest.mark.parametrize("serial", [False, True])
def test_a_barrier_for_each_hazard(
    hazard: list[tuple[str, str]], expected: str, serial: bool
) -> None:
    assert barriers(*(launch(*item) for item in hazard)) == expected
    # the same buffers, as inputs, outputs and weights
    assert barriers(*(launch(*item) for item in hazard), kinds="iowiowio") == expected
    # worker 0 runs serial launches in order
    assert barriers(*(launch(*item, True) for item in hazard)) == "." * len(hazard)
    # between a serial and a parallel launch each hazard needs a barrier
    mixed = [launch(*item, serial == bool(i % 2)) for i, item in enumerate(hazard)]
    if len(hazard) == 2:
        assert barriers(*mixed) == expected


def test_serial_launches_wait_for_parallel_ones_only() -> None:
    made, used = launch("a", "b"), launch("b", "c", True)
    assert barriers(launch("c", "d", True), made, used, launch("c", "e", True)) == "..|."
    assert barriers(launch("a", "b", True), launch("b", "c", True), launch("c", "d")) == "..|"
    assert barriers(launch("a", "b", True), launch("c", "a", True), launch("d", "a")) == "..|"
    # a barrier orders launches of both kinds
    assert barriers(launch("a", "b", True), launch("b", "c"), launch("d", "b", True)) == ".||"


def test_parts_of_one_buffer_are_written_side_by_side() -> None:
    left, right = launch("a", "c", parts="c"), launch("b", "c", parts="c")
    whole = launch("d", "c")
    assert barriers(left, right, launch("c", "e")) == "..|"
    assert barriers(left, whole) == ".|"
    assert barriers(whole, left) == ".|"
    assert barriers(left, right, whole, left) == "..||"
    assert barriers(whole, launch("", "f"), left, right) == "..|."
    assert barriers(launch("c", "e"), left, right) == ".|."
    assert barriers(launch("a", "c", True, "c"), right, whole) == "..|"


def test_a_part_after_the_whole_keeps_the_barrier_for_later_parts() -> None:
    whole, part = launch("a", "c", serial=True), launch("b", "c", serial=True, parts="c")
    assert barriers(whole, part, launch("d", "c", parts="c")) == "..|"


def test_in_place_reuse_waits_for_other_readers() -> None:
    """b reuses the memory of a in place: other readers of a must have finished."""
    make, take = launch("", "a"), launch("a", "b", in_place="ba")
    alone = plan(make, take)
    assert alone.barriers == [False, True]
    assert alone.block_of[0] == alone.block_of[1]
    other = plan(make, launch("a", "c"), take)
    assert other.block_of[0] == other.block_of[1]
    assert other.barriers == [False, True, True]
    late = plan(make, take, launch("a", "c"))
    assert late.block_of[0] != late.block_of[1]
    assert late.barriers == [False, True, False]
    serial = plan(make, launch("a", "c", True), launch("a", "b", True, in_place="ba"))
    assert serial.block_of[0] == serial.block_of[1]
    assert serial.barriers == [False, True, False]


def test_readers_of_reused_memory_wait() -> None:
    chain = plan(
        launch("", "a"),
        launch("a", "b", in_place="ba"),
        launch("b", "c", in_place="cb"),
        launch("c", "d"),
    )
    assert chain.barriers == [False, True, True, True]
    assert chain.block_of[0] == chain.block_of[1] == chain.block_of[2] != chain.block_of[3]


@pytest.mark.parametrize(
    ("take", "sizes"),
    [
        (launch("aa", "b", in_place="ba"), "11111111"),  # read twice
        (launch("a", "b", in_place="ba"), "12111111"),  # another size
        (launch("a", "bc", in_place="ba ca"), "11111111"),  # two results
    ],
)
def test_memory_is_reused_in_place_once_and_whole(take: Launch, sizes: str) -> None:
    result = plan(launch("", "a"), take, launch("bc", "d"), sizes=sizes)
    places = [result.block_of[b] for b in take.writes]
    assert places.count(result.block_of[0]) == (len(places) > 1)
    assert len(set(places)) == len(places)


def test_a_block_is_reused_after_a_barrier_only() -> None:
    make, read = launch("", "a"), launch("a", "b")
    # a is dead after `read`, which may still be running
    busy = plan(make, read, launch("", "c"))
    assert busy.barriers == [False, True, False]
    assert busy.block_of[2] not in (busy.block_of[0], busy.block_of[1])
    # c waits for b, so the readers of a are done: its block is free without another barrier
    done = plan(make, read, launch("b", "c"))
    assert done.barriers == [False, True, True]
    assert done.block_of[2] == done.block_of[0]
    # a serial launch does not reuse memory that a parallel one may be reading
    serial = plan(make, read, launch("", "c", True))
    assert serial.block_of[2] not in (serial.block_of[0], serial.block_of[1])


def test_a_reused_block_waits_for_its_readers() -> None:
    """e reuses the block of a after the barrier; the next writer of the block waits for the readers of e."""
    steps = [
        launch("", "a"),
        launch("a", "b"),
        launch("b", "c"),
        launch("c", "d"),
        launch("cd", "e"),
    ]
    result = plan(*steps)
    assert result.barriers == [False, True, True, True, True]
    for index, step in enumerate(steps):
        alive = {b for b in range(5) if any(b in (*s.reads, *s.writes) for s in steps[index:])}
        touched = {*step.reads, *step.writes}
        assert len({result.block_of[b] for b in touched}) == len(touched)
        assert touched <= alive


def test_jumps_and_their_targets() -> None:
    test = launch("a", jump=Jump("if_zero", 0))
    go = launch(jump=Jump("always", 0))
    back = launch(jump=Jump("back", 0))
    assert barriers(launch("b", "c"), test, launch("d", "e")) == ".|."
    assert barriers(launch("b", "c"), go, launch("d", "e")) == "..."
    assert barriers(launch("b", "c"), back, launch("d", "e")) == ".|."
    # the launch after a label follows one of two launches
    assert barriers(launch("b", "c"), launch("d", "e"), launch("d", "f"), labels=[1]) == ".|."
    # the next writer of the predicate waits for its readers
    assert barriers(test, launch("b", "a")) == ".|"


def test_values_that_a_loop_reads_live_to_its_end() -> None:
    """a is written before the loop and read at its start: temporaries of the loop must not reuse its memory."""
    steps = [
        launch("", "a"),
        launch("a", "b"),
        launch("b", "c"),
        launch("c", "d"),
        launch("d", "e"),
    ]
    loose = plan(*steps)
    assert loose.block_of[2] == loose.block_of[0]
    kept = plan(*steps, labels=[1], loops=[(1, 4)])
    assert kept.block_of[0] not in {kept.block_of[b] for b in (1, 2, 3)}
    assert kept.block_of[4] == kept.block_of[0] or kept.block_of[4] != kept.block_of[3]


def test_segments_have_arenas_of_their_own() -> None:
    steps = [launch("", "a"), launch("a", "b"), launch("b", "c"), launch("c", "d")]
    result = plan(*steps, cuts=[2])
    assert [block.segment for block in result.blocks] == [0, 0, 1, 1]
    assert result.barriers == [False, True, False, True]


def test_the_checker_exchanges_each_pair_without_a_barrier() -> None:
    steps = [program.Launch(1, [], barrier=b, serial=s, name=n) for n, b, s in (
        ("a", False, False), ("b", False, True), ("c", False, False), ("d", False, True),
        ("e", True, False), ("f", False, False),
    )]  # fmt: skip
    names = ["".join(item.name for item in reorder(steps, order)) for order in ORDERS]
    assert names == ["bdcafe", "cabdfe"]
    assert all(item.barrier for item in reorder(steps, "serial first"))


# ***** programs: out of order they compute the interpreter's results *****


SIDE = 192
"""Sizes of a matrix: more than one chunk of work, else launches are serial."""


def tensor() -> TensorType:
    return TensorType(DType.float32, [SIDE, SIDE], DEVICE)


def buffer() -> BufferType:
    return BufferType(DType.float32, [SIDE, SIDE], DEVICE)


def accumulate(x: TensorValue, axis: int = 0) -> TensorValue:
    """A launch that is not fused."""
    return ops.cumsum(x, axis=axis) * 0.125


def read_after_write(graph: Graph) -> None:
    x, y = (value.tensor for value in graph.inputs)
    a, b = accumulate(x), accumulate(y)
    graph.output(accumulate(a) + b, accumulate(b), accumulate(a + b))


def write_after_read(graph: Graph) -> None:
    state, x = graph.inputs[0].buffer, graph.inputs[1].tensor
    before = ops.cumsum(state[...], axis=0)
    ops.buffer_store(state, x * 2.0)
    graph.output(before, accumulate(x))


def write_after_write(graph: Graph) -> None:
    state, x = graph.inputs[0].buffer, graph.inputs[1].tensor
    ops.buffer_store(state, x * 2.0)
    ops.buffer_store(state, x * 3.0)
    graph.output(accumulate(x))


def reads_through_views(graph: Graph) -> None:
    """Rows of a buffer are read, then overlapping views of it are written."""
    state, x = graph.inputs[0].buffer, graph.inputs[1].tensor
    a = ops.cumsum(state[24:180], axis=0)
    b = ops.cumsum(ops.transpose(state[:150], 0, 1), axis=0)
    ops.buffer_store_slice(state, x[:144] * 2.0, [slice(0, 144)])
    graph.output(a, b)


def writes_through_views(graph: Graph) -> None:
    """Overlapping parts of a buffer are written in order."""
    state, x = graph.inputs[0].buffer, graph.inputs[1].tensor
    rows, columns, turned = x[:144] * 2.0, x[:, :120] * 3.0, ops.transpose(x[30:], 0, 1) - 1.0
    ops.buffer_store_slice(state, rows, [slice(0, 144)])
    ops.buffer_store_slice(state, columns, [slice(None), slice(0, 120)])
    ops.buffer_store_slice(state, turned, [slice(None), slice(30, SIDE)])
    graph.output(accumulate(x))


def in_place(graph: Graph) -> None:
    """A sum reuses the memory of an operand that other launches read."""
    x, y = (value.tensor for value in graph.inputs)
    a = ops.cumsum(x, axis=0)
    b = ops.cumsum(a, axis=1)
    d = ops.tanh(a) + y
    graph.output(b, accumulate(d))


def many_temporaries(graph: Graph) -> None:
    """Independent chains whose temporaries share memory."""
    x, y = (value.tensor for value in graph.inputs)
    results: list[TensorValue] = []
    for i in range(4):
        a, b = accumulate(x + float(i)), accumulate(y * float(i + 1), 1)
        for _ in range(3):
            a, b = accumulate(b) - a, accumulate(a * 0.5, 1)
        results += [a, b]
    graph.output(*results)


def loop(graph: Graph) -> None:
    x, y = (value.tensor for value in graph.inputs)
    a = accumulate(x)
    zero = ops.constant(0, DType.int64, DEVICE)

    def body(i: TensorValue, u: TensorValue, v: TensorValue) -> list[TensorValue]:
        w = accumulate(v) + a
        return [i + 1, w, accumulate(u - w, 1)]

    _, u, v = ops.while_loop([zero, y, x], lambda i, u, v: i < 3, body)
    graph.output(u, v, accumulate(a))


def branches(graph: Graph) -> None:
    x, y = (value.tensor for value in graph.inputs)
    a = accumulate(x)
    choice = ops.sum(ops.sum(y), axis=0).reshape([]) > 0.0
    result = ops.cond(
        choice,
        [x.type],
        lambda: accumulate(accumulate(a) + y),
        lambda: accumulate(a - y),
    )[0]
    graph.output(result + a, accumulate(result), a)


def data_dependent_sizes(graph: Graph) -> None:
    x, y = (value.tensor for value in graph.inputs)
    a = accumulate(x)
    picked = ops.gather(a, ops.squeeze(ops.nonzero(y[0] > 0.0, "picked"), 1), axis=0)
    b = ops.cumsum(picked, axis=0)
    graph.output(b, ops.cumsum(b * 0.5 + picked, axis=0), accumulate(a))


def products(graph: Graph) -> None:
    """Weights packed at load; products whose epilogues reuse the memory of a residual."""
    x, y = (value.tensor for value in graph.inputs)
    rng = np.random.default_rng(3)
    weights = [
        ops.constant(rng.uniform(-0.1, 0.1, (SIDE, SIDE)).astype(np.float32), DType.float32, DEVICE)
        for _ in range(4)
    ]
    h = x + accumulate(y)
    for w in weights:
        h = h + ops.silu(h @ w) * (h @ ops.transpose(w, 0, 1))
    graph.output(h, ops.cumsum(h, axis=0))


def serial_then_parallel(graph: Graph) -> None:
    x, y = (value.tensor for value in graph.inputs)
    row = ops.tanh(x[:1] * 2.0)
    graph.output(y - row, row)


def serial_and_parallel(graph: Graph) -> None:
    """Launches over a row are serial, those between them parallel."""
    x, y = (value.tensor for value in graph.inputs)
    row = ops.tanh(x[:1] * 2.0)
    a = ops.cumsum(x, axis=0) + ops.cumsum(row, axis=1)
    last = ops.tanh(a[-1:] - row)
    b = ops.cumsum(y, axis=1) * last
    graph.output(a, b, ops.cumsum(last, axis=1), ops.concat([row, b, last], axis=0))


def sizes_as_elements(graph: Graph) -> None:
    """A serial launch writes the sizes that a parallel one reads."""
    x = graph.inputs[0].tensor
    sizes = TensorValue(x.shape)
    graph.output(x * sizes[0].cast(x.dtype) - sizes[1].cast(x.dtype))


TWO = (tensor(), tensor())
STATE = (buffer(), tensor())
CASES: dict[Callable[[Graph], None], tuple[TensorType | BufferType, ...]] = {
    read_after_write: TWO,
    write_after_read: STATE,
    write_after_write: STATE,
    reads_through_views: STATE,
    writes_through_views: STATE,
    in_place: TWO,
    many_temporaries: TWO,
    loop: TWO,
    branches: TWO,
    data_dependent_sizes: TWO,
    products: TWO,
    sizes_as_elements: (TensorType(DType.float32, ["rows", SIDE], DEVICE),),
    serial_then_parallel: TWO,
    serial_and_parallel: TWO,
}


BARRIERS: dict[Callable[[Graph], None], tuple[str, str]] = {
    read_after_write: (".|.||||.|", "0:2 2:3 1:4 3:5 345:678 6:9 9:A 8:B B:C"),
    # the store waits for the product; that waits for nobody
    write_after_read: (".|.|.|", "0:2 2:3 1:4 4:0 1:5 5:6"),
    write_after_write: (".||.|", "1:23 2:0 3:0 1:4 4:5"),
    reads_through_views: (".|.||.|", "0:2 2:3 0:4 4:5 5:6 1:7 7:0"),
    # the parts of the buffer overlap
    writes_through_views: ("...|||.|", "1:2 1:3 1:4 2:0 3:0 4:0 1:5 5:6"),
    # the third launch overwrites what the second one reads
    in_place: (".||||", "0:2 2:3 12:4 4:5 5:6"),
}
"""The barriers of programs, and what each launch reads and writes."""


@pytest.mark.parametrize("case", BARRIERS, ids=lambda case: case.__name__)
def test_the_barriers_of_programs(case: Callable[[Graph], None]) -> None:
    with Graph(case.__name__, input_types=CASES[case]) as graph:
        case(graph)
    launches = explain_graph(graph)["launches"]
    marks = "".join(".|"[item["barrier"]] for item in launches)
    buffers = [
        ":".join("".join(f"{b:X}" for b in item[kind]) for kind in ("reads", "writes"))
        for item in launches
    ]
    assert (marks, " ".join(buffers)) == BARRIERS[case]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_programs_out_of_order(case: Callable[[Graph], None], order: str) -> None:
    with Graph(case.__name__, input_types=CASES[case]) as graph:
        case(graph)
    rng = np.random.default_rng(7)
    arrays = [rng.uniform(-2, 2, (SIDE, SIDE)).astype(np.float32) for _ in CASES[case]]
    in_order, expected_arrays = ([array.copy() for array in arrays] for _ in range(2))
    bounds = interpret(graph, arrays)
    _interpreter.run(graph, expected_arrays)  # writes the buffers
    same = SESSION.load(graph).execute(*map(Tensor.from_numpy, in_order))
    with reordered(order):
        model = SESSION.load(graph)
    outputs = model.execute(*map(Tensor.from_numpy, arrays))
    for output, other, (wanted, bound) in zip(outputs, same, bounds, strict=True):
        np.testing.assert_array_equal(output.to_numpy(), other.to_numpy())  # the same kernels
        assert_within(output.to_numpy(), wanted, bound)
    for array, other, wanted in zip(arrays, in_order, expected_arrays, strict=True):
        np.testing.assert_array_equal(array, other)
        assert_close(array, wanted)


@k.register("barriers.twice")
def twice(out: k.Output, x: k.Input, ctx: k.Context):
    for i, j in ctx.parallel(out.shape):
        out[i, j] = x[i, j] * 2


@k.register("barriers.add_to")
def add_to(state: k.InOut, x: k.Input, ctx: k.Context):
    for i, j in ctx.parallel(state.shape):
        state[i, j] = state[i, j] + x[i, j]


@pytest.mark.parametrize("order", ORDERS)
def test_custom_ops_out_of_order(order: str) -> None:
    """Their results are read by other launches, and the buffers that they change are read before and after."""
    with Graph("custom", input_types=STATE) as graph:
        state, x = graph.inputs[0].buffer, graph.inputs[1].tensor
        before = ops.cumsum(state[...], axis=0)
        (doubled,) = ops.custom("barriers.twice", DEVICE, [x], [x.type])
        ops.inplace_custom("barriers.add_to", DEVICE, [state, doubled.tensor])
        ops.inplace_custom("barriers.add_to", DEVICE, [state, x])
        graph.output(before, ops.cumsum(doubled.tensor, axis=1), ops.cumsum(state[...], axis=1))
    rng = np.random.default_rng(7)
    held, x = rng.integers(-9, 10, (2, SIDE, SIDE)).astype(np.float32)  # whose sums are exact
    after = held + 3 * x
    expected = [np.cumsum(held, 0), np.cumsum(2 * x, 1), np.cumsum(after, 1)]
    with reordered(order):
        model = SESSION.load(graph)
    for output, wanted in zip(model.execute(held, x), expected, strict=True):
        np.testing.assert_array_equal(output.to_numpy(), wanted)
    np.testing.assert_array_equal(held, after)


def test_what_custom_ops_read_and_write() -> None:
    """A kernel reads its inputs, tensors and buffers; it reads and writes the buffers that it changes."""
    with Graph("custom", input_types=STATE) as graph:
        state, x = graph.inputs
        (read,) = ops.inplace_custom("barriers.twice", DEVICE, [state], [x.type])
        (doubled,) = ops.custom("barriers.twice", DEVICE, [x], [x.type])
        ops.inplace_custom("barriers.add_to", DEVICE, [state, doubled])
        graph.output(read)
    first, second, last = explain_graph(graph)["launches"]
    assert (first["reads"], second["reads"]) == ([0], [1]), "the inputs are the first buffers"
    assert not {0, 1} & {*first["writes"], *second["writes"]}
    assert {*last["reads"]} == {0, *second["writes"]} and last["writes"] == [0]
    assert not any(launch["serial"] for launch in (first, second, last))


def test_a_kernel_of_the_library_that_changes_a_buffer_writes_it() -> None:
    types = [
        BufferType(DType.int32, ["pairs", 2], DEVICE),
        TensorType(DType.uint32, ["starts"], DEVICE),
        TensorType(DType.int32, ["batch"], DEVICE),
    ]
    with Graph("counts", input_types=types) as graph:
        stage_declared("frequencies.update", graph.inputs)
        graph.output()
    (update,) = explain_graph(graph)["launches"]
    assert sorted(update["reads"]) == [0, 1, 2] and update["writes"] == [0]


def test_reordering_moves_launches() -> None:
    """With a barrier before each launch the tests above would check nothing."""
    moved: dict[str, int] = {}
    for case, types in CASES.items():
        with Graph(case.__name__, input_types=types) as graph:
            case(graph)
        with reordered("serial last") as counts:
            SESSION.load(graph)
        moved[case.__name__] = sum(counts)
    assert sum(count > 0 for count in moved.values()) >= 5, moved


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_random_programs_out_of_order(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from((Builder, ExactBuilder)))
    graph, arrays, drawn = draw_case(data, data.draw(st.integers(4, 14)), kind)
    expected = interpret(graph, arrays)
    in_order = SESSION.load(graph).execute(*arrays)
    for order in ORDERS:
        with reordered(order):
            model = SESSION.load(graph)
        outputs = model.execute(*arrays)
        try:
            for output, same, (wanted, bound) in zip(outputs, in_order, expected, strict=True):
                # the same kernels on the same operands
                np.testing.assert_array_equal(output.to_numpy(), same.to_numpy())
                assert_within(output.to_numpy(), wanted, bound * (kind is Builder))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{order}, {drawn}\n{graph}") from None
