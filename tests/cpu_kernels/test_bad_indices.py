"""Invalid indices, offsets, page tables, counts and parameters: the engine returns what the interpreter returns, or
both raise.

Inputs lie between guard pages, so that an access outside of an input ends the test run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.graph.ops.staging.stage import stage, stage_declared
from max.nn import kernels
from max.nn.kernels.recurrence import gated_delta_rule as delta_rule
from tests.guarded import Margins
from tests.tolerance import assert_close

CPU_REF = DeviceRef.CPU()
Array = np.ndarray[Any, Any]
Draw = Callable[[Any], Any]
F32, I64, I32, U32, U64 = DType.float32, DType.int64, DType.int32, DType.uint32, DType.uint64
RAISED = (ValueError, IndexError, _interpreter.InterpreterError)


@dataclass(frozen=True)
class Case:
    """A graph, and a generator of its inputs.

    Args:
        types: Dtype and shape of each input; buffers are in brackets.
        body: The graph.
        draw: Draws the arrays.
    """

    types: Sequence[Any]
    body: Callable[..., Any]
    draw: Callable[[Draw], Sequence[Array]]


CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


@functools.cache
def session() -> InferenceSession:
    return InferenceSession(devices=[CPU()])


@functools.cache
def loaded_case(name: str) -> tuple[Case, Graph, Model]:
    this = CASES[name]()
    types = [
        BufferType(*t[0], CPU_REF) if isinstance(t, list) else TensorType(*t, CPU_REF)
        for t in this.types
    ]

    def forward(*args: Any) -> Any:
        outputs = this.body(
            *(
                a.buffer if isinstance(t, list) else a.tensor
                for a, t in zip(args, this.types, strict=True)
            )
        )
        return () if outputs is None else outputs

    graph = Graph(name, forward, input_types=types)
    return this, graph, session().load(graph)


def compare(name: str, arrays: Sequence[Array], end: bool = True) -> bool:
    """Runs a case in the engine and in the interpreter; returns whether it has a result."""
    this, graph, model = loaded_case(name)
    buffers = [isinstance(t, list) for t in this.types]
    copies = [np.array(a) for a in arrays]
    margins = Margins()
    guarded = [margins.guard(a, end) for a in arrays]
    want: list[Array] | None = None
    try:
        want = _interpreter.run(graph, copies, {})
    except RAISED:
        pass
    try:
        got = [np.array(out.to_numpy()) for out in model.execute(*guarded)]
    except RAISED as error:
        assert want is None, f"the engine raises, the interpreter does not: {error}"
        margins.check()
        return False
    margins.check()
    assert want is not None, f"the engine does not raise: {got}"
    for have, expected in zip(got, want, strict=True):
        assert_close(have, expected)
    for after, expected, original, buffer in zip(guarded, copies, arrays, buffers, strict=True):
        if buffer:
            assert_close(after, expected)
        else:
            np.testing.assert_array_equal(after, original)
    return True


def index(size: int, dtype: type = np.int64) -> st.SearchStrategy[int]:
    """An index of an axis: valid, one beyond, or far beyond."""
    info = np.iinfo(dtype)
    ends = (
        -(2**63),
        -(2**31),
        -(2**31) - 1,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**63 - 1,
        2**63,
        2**64 - 1,
    )
    wild = [n for n in (*ends, -size - 1, -size, size - 1, size) if info.min <= n <= info.max]
    low, high = max(-size, int(info.min)), size - 1
    usual = st.integers(low, high) if size else st.sampled_from(wild)
    edge = [n for n in (-size - 1, size) if n >= info.min]
    kinds = {0: st.sampled_from(wild), 1: st.sampled_from(edge)}
    return st.integers(0, 15).flatmap(lambda n: kinds.get(n, usual))


def indices(draw: Draw, shape: Sequence[int], size: int, dtype: type = np.int64) -> Array:
    count = int(np.prod(shape))
    one = index(size, dtype)
    if size and draw(st.booleans()):
        one = st.integers(max(-size, int(np.iinfo(dtype).min)), size - 1)
    flat = draw(st.lists(one, min_size=count, max_size=count))
    return np.array(flat, dtype).reshape(tuple(shape))


def numbers(draw: Draw, shape: Sequence[int], dtype: type = np.float32) -> Array:
    return (
        np.random.default_rng(draw(st.integers(0, 9))).integers(-9, 9, tuple(shape)).astype(dtype)
    )


def sizes(draw: Draw, count: int, low: int = 0, high: int = 5) -> list[int]:
    return [draw(st.integers(low, high)) for _ in range(count)]


def gather_case(axis: int, dtype: DType) -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 3)
        n = pick(st.integers(0, 6))
        return [numbers(pick, shape), indices(pick, [n], shape[axis], dtype.to_numpy().type)]

    types = [(F32, ["a", "b", "c"]), (dtype, ["n"])]
    return Case(types, lambda x, i: ops.gather(x, i, axis), draw)


for _axis in range(3):
    for _dtype in (DType.int8, I32, I64, DType.uint8, U32, U64):
        CASES[f"gather_{_axis}_{_dtype.name}"] = functools.partial(gather_case, _axis, _dtype)


def gather_nd_case(batch_dims: int, depth: int) -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 4)
        lead = shape[:batch_dims]
        parts = [indices(pick, [*lead, 3], shape[batch_dims + d])[..., None] for d in range(depth)]
        return [numbers(pick, shape), np.concatenate(parts, -1)]

    lead = ["a", "b", "c", "d"][:batch_dims]
    types = [(F32, ["a", "b", "c", "d"]), (I64, [*lead, "n", depth])]
    return Case(types, lambda x, i: ops.gather_nd(x, i, batch_dims), draw)


for _batch, _depth in ((0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (2, 1)):
    CASES[f"gather_nd_{_batch}_{_depth}"] = functools.partial(gather_nd_case, _batch, _depth)


def scatter_case(axis: int, op: Any = ops.scatter) -> Case:
    names: list[Any] = ["a", "b"]
    names[axis] = "n"

    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 2)
        other = list(shape)
        other[axis] = pick(st.integers(0, 6))
        return [numbers(pick, shape), numbers(pick, other), indices(pick, other, shape[axis])]

    types = [(F32, ["a", "b"]), (F32, names), (I64, names)]
    return Case(types, lambda x, u, i: op(x, u, i, axis), draw)


def scatter_nd_case(depth: int, dtype: DType, op: Any = ops.scatter_nd) -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 3)
        n = pick(st.integers(0, 6))
        parts = [indices(pick, [n], shape[d], dtype.to_numpy().type)[:, None] for d in range(depth)]
        return [numbers(pick, shape), numbers(pick, [n, *shape[depth:]]), np.concatenate(parts, -1)]

    names = ["a", "b", "c"]
    types = [(F32, names), (F32, ["n", *names[depth:]]), (dtype, ["n", depth])]
    return Case(types, op, draw)


for _axis in range(2):
    CASES[f"scatter_{_axis}"] = functools.partial(scatter_case, _axis)
    CASES[f"scatter_add_{_axis}"] = functools.partial(scatter_case, _axis, ops.scatter_add)
for _depth in (1, 2, 3):
    for _dtype in (I64, U64):
        CASES[f"scatter_nd_{_depth}_{_dtype.name}"] = functools.partial(
            scatter_nd_case, _depth, _dtype
        )
CASES["scatter_nd_max"] = functools.partial(scatter_nd_case, 2, I64, ops.scatter_nd_max)


@case
def scatter_set_constant() -> Case:
    def draw(pick: Draw) -> list[Array]:
        a, b = sizes(pick, 2, 1)
        parts = [indices(pick, [3], size)[:, None] for size in (a, b)]
        return [numbers(pick, [a, b]), np.concatenate(parts, -1)]

    types = [[(F32, ["a", "b"])], (I64, ["n", 2])]
    return Case(types, lambda x, i: kernels.scatter_set_constant(x, i, 7.0), draw)


def step(size: int) -> st.SearchStrategy[int]:
    return st.sampled_from([1, 2, -1, -2, 0, 0, size, -size, 2**63 - 1, -(2**63), 2**62])


def bounds(draw: Draw, size: int) -> list[Array]:
    bounds = [draw(index(size)), draw(index(size)), draw(step(size))]
    return [np.array(n, np.int64) for n in bounds]


@case
def slice_of_new_size() -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 2)
        return [numbers(pick, shape), *bounds(pick, shape[0])]

    scalars = [(I64, [])] * 3
    return Case(
        [(F32, ["a", "b"]), *scalars],
        lambda x, start, stop, by: x[(slice(start, stop, by), "n"), :],
        draw,
    )


@case
def slice_of_known_size() -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 2)
        n = pick(st.integers(0, 3))
        return [numbers(pick, shape), *bounds(pick, shape[1]), numbers(pick, [n])]

    return Case(
        [(F32, ["a", "b"]), *[(I64, [])] * 3, (F32, ["n"])],
        lambda x, start, stop, by, like: x[:, (slice(start, stop, by), like.shape[0])],
        draw,
    )


@case
def element() -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 2)
        return [numbers(pick, shape), *(indices(pick, [], size) for size in shape)]

    return Case([(F32, ["a", "b"]), (I64, []), (I64, [])], lambda x, i, j: (x[i], x[i, j]), draw)


@case
def store_slice() -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 2)
        n = pick(st.integers(0, 3))
        return [numbers(pick, shape), *bounds(pick, shape[0]), numbers(pick, [n, shape[1]])]

    def body(b: Any, start: Any, stop: Any, by: Any, x: Any) -> None:
        ops.buffer_store_slice(b, x, [(slice(start, stop, by), x.shape[0]), slice(None)])

    return Case([[(F32, ["a", "b"])], *[(I64, [])] * 3, (F32, ["n", "b"])], body, draw)


def range_case(dtype: DType) -> Case:
    def draw(pick: Draw) -> list[Array]:
        kind = dtype.to_numpy().type
        if dtype.is_float():
            value = st.sampled_from(
                [0.0, -0.0, 1, 2.5, 5, -3, np.nan, np.inf, -np.inf, 1e30, 1e-30]
            )
        else:
            info = np.iinfo(kind)
            wild = [
                n
                for n in (-(2**63), -3, -2, -1, 2**31 - 1, 2**63 - 1, 2**64 - 1)
                if info.min <= n <= info.max
            ]
            value = st.integers(0, 6) | st.sampled_from([int(info.min), int(info.max), *wild])
        operands = [np.array(pick(value), kind) for _ in range(3)]
        return [*operands, numbers(pick, [pick(st.integers(0, 4))])]

    types = [*[(dtype, [])] * 3, (F32, ["n"])]
    return Case(
        types,
        lambda a, b, c, like: ops.range(
            a, b, c, out_dim=like.shape[0], dtype=dtype, device=CPU_REF
        ),
        draw,
    )


for _dtype in (I64, I32, U64, DType.uint8, F32, DType.float64):
    CASES[f"range_{_dtype.name}"] = functools.partial(range_case, _dtype)


@case
def nonzero() -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 2, 0, 3)
        mask = numbers(pick, shape) > pick(st.integers(-10, 9))
        return [mask, numbers(pick, [pick(st.integers(0, 3))])]

    return Case(
        [(DType.bool, ["a", "b"]), (F32, ["n"])],
        lambda mask, like: ops.nonzero(mask, like.shape[0]),
        draw,
    )


@case
def masked_scatter() -> Case:
    def draw(pick: Draw) -> list[Array]:
        shape = sizes(pick, 2, 0, 3)
        mask = numbers(pick, shape) > pick(st.integers(-10, 9))
        return [numbers(pick, shape), mask, numbers(pick, [pick(st.integers(0, 5))])]

    return Case(
        [(F32, ["a", "b"]), (DType.bool, ["a", "b"]), (F32, ["n"])],
        lambda x, mask, updates: ops.masked_scatter(x, mask, updates, "found"),
        draw,
    )


def repeat_case(new: bool) -> Case:
    def draw(pick: Draw) -> list[Array]:
        n, m, other = sizes(pick, 3)
        count = st.integers(0, 2) | st.sampled_from([-1, -2, 3, -(2**63), 2**63 - 1, 2**62])
        repeats = pick(st.lists(st.integers(0, 2) | count, min_size=n, max_size=n))
        total = pick(st.sampled_from([min(max(sum(repeats), 0), 20), 3]))
        return [numbers(pick, [n, other]), np.array(repeats, np.int64), numbers(pick, [total])]

    return Case(
        [(F32, ["n", "b"]), (I64, ["n"]), (F32, ["m"])],
        lambda x, repeats, like: ops.repeat_interleave(
            x, repeats, 0, out_dim="found" if new else like.shape[0]
        ),
        draw,
    )


CASES["repeat_interleave"] = functools.partial(repeat_case, True)
CASES["repeat_interleave_known"] = functools.partial(repeat_case, False)


def offsets(draw: Draw, batch: int, rows: int, dtype: type = np.uint32) -> Array:
    """The first rows of a ragged batch's sequences, sometimes invalid."""
    cuts = sorted(
        draw(st.lists(st.integers(0, rows), min_size=max(batch - 1, 0), max_size=max(batch - 1, 0)))
    )
    starts = [0, *cuts, rows][: batch + 1] if batch else [0]
    match draw(st.integers(0, 9)):
        case 0:
            starts = draw(st.permutations(starts))
        case 1:
            at = draw(st.integers(0, batch))
            starts[at] = draw(
                st.sampled_from([0, 1, rows - 1 if rows else 0, rows, rows + 1, 2**31, 2**32 - 1])
            )
        case 2:
            starts = [(n + 1) for n in starts]
        case _:
            pass
    return np.array(starts, dtype)


@case
def merge_ragged_tensors() -> Case:
    def draw(pick: Draw) -> list[Array]:
        batch, a, b = sizes(pick, 3, 0, 4)
        return [
            numbers(pick, [a, 2]), offsets(pick, batch, a), numbers(pick, [b, 2]), offsets(pick, batch, b),
        ]  # fmt: skip

    types = [(F32, ["a", 2]), (U32, ["o"]), (F32, ["b", 2]), (U32, ["o"])]
    return Case(types, kernels.merge_ragged_tensors, draw)


@case
def gated_delta_rule() -> Case:
    def draw(pick: Draw) -> list[Array]:
        batch, total, states = pick(st.integers(0, 3)), pick(st.integers(0, 9)), 4
        slots = pick(st.permutations(range(states)))[:batch]
        if batch and pick(st.integers(0, 3)) == 0:
            slots[pick(st.integers(0, batch - 1))] = pick(st.sampled_from([states, 2**32 - 1, 0]))
        lengths = [pick(st.sampled_from([0, 1, 2**32 - 1])) for _ in slots]
        return [
            *(numbers(pick, [total, 1, 3]).clip(-1, 1) for _ in range(2)), numbers(pick, [total, 2, 5]),
            np.zeros([total, 2], np.float32), np.full([total, 2], 0.5, np.float32), offsets(pick, batch, total),
            np.array(lengths, np.uint32), np.array(slots, np.uint32), numbers(pick, [states, 2, 2, 3, 5]),
            np.array(pick(st.sampled_from([0, 1, 0, 1, 1, 2, 2**32 - 1])), np.uint32),
        ]  # fmt: skip

    sizes: list[list[Any]] = [["t", 1, 3], ["t", 1, 3], ["t", 2, 5], ["t", 2], ["t", 2]]
    types = [
        *((F32, size) for size in sizes),
        (U32, ["o"]),
        (U32, ["b"]),
        (U32, ["b"]),
        [(F32, ["s", "l", 2, 3, 5])],
        (U32, []),
    ]
    # halves of small integers: sums are exact in any order
    return Case(types, functools.partial(delta_rule, scale=1.0, normalized=False), draw)


@case
def penalties() -> Case:
    def draw(pick: Draw) -> list[Array]:
        batch, n = sizes(pick, 2, 0, 4)
        vocabulary = pick(st.integers(1, 6))
        token = index(vocabulary, np.int32).map(
            lambda t: t + vocabulary if -vocabulary <= t < 0 else t
        )
        data = [[pick(token), pick(st.integers(-1, 3))] for _ in range(n)]
        where = offsets(pick, batch, n)
        return [numbers(pick, [batch, vocabulary]), np.array(data, np.int32).reshape(n, 2), where]

    def body(logits: Any, data: Any, where: Any) -> None:
        kernels.apply_penalties_to_logits(
            logits,
            data,
            where,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            repetition_penalty=2.0,
        )

    return Case([[(F32, ["batch", "vocab"])], (I32, ["n", 2]), (U32, ["o"])], body, draw)


def sampled_logits(pick: Draw) -> list[Array]:
    """Logits and sampling parameters, some of them out of range."""
    batch, vocabulary = pick(st.integers(0, 3)), pick(st.integers(0, 9))
    logits = numbers(pick, [batch, vocabulary])
    wild = [np.nan, np.inf, -np.inf, 3e38]
    for _ in range(pick(st.integers(0, 3)) if logits.size else 0):
        logits.flat[pick(st.integers(0, logits.size - 1))] = pick(st.sampled_from(wild))
    if pick(st.integers(0, 5)) == 0:
        logits[:] = pick(st.sampled_from([-np.inf, np.nan, np.inf]))

    def each(usual: Sequence[float], odd: Sequence[float], dtype: type) -> Array:
        of = st.integers(0, 19).flatmap(lambda n: st.sampled_from(odd if n == 0 else usual))
        return np.array([pick(of) for _ in range(batch)], dtype)

    return [
        logits,
        each([0, 0.5, 1, 2], [-1, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3e38], np.float32),
        each([0, -1, 1, 3, 9], [10, 300, 2**31, 2**63 - 1, -(2**63)], np.int64),
        each([1, 0.5, 0], [-0.1, 1.1, np.nan, np.inf], np.float32),
        each([0, 0.1, 1], [-0.1, 1.1, np.nan, np.inf], np.float32),
        each([0, 1], [2**64 - 1], np.uint64),
    ]


SAMPLED_TYPES = [(F32, ["batch", "vocab"]), *[(d, ["batch"]) for d in (F32, I64, F32, F32, U64)]]


@case
def sampling() -> Case:
    def body(*values: Any) -> Any:
        return stage_declared("sample.token", values)[0]

    return Case(SAMPLED_TYPES, body, sampled_logits)


@case
def sampling_allowed() -> Case:
    def draw(pick: Draw) -> list[Array]:
        inputs = sampled_logits(pick)
        shape = len(inputs[0]), pick(st.integers(0, 2))
        words = [pick(st.integers(-(2**31), 2**31 - 1)) for _ in range(math.prod(shape))]
        return [*inputs, np.array(words, np.int32).reshape(shape)]

    def body(*values: Any) -> Any:
        return stage_declared("sample.allowed", values)[0]

    return Case([*SAMPLED_TYPES, [(I32, ["batch", "words"])]], body, draw)


@case
def step_ready() -> Case:
    def draw(pick: Draw) -> list[Array]:
        number = st.sampled_from([0, 1, 2, -1, 2**63 - 1, -(2**63)])
        sizes = [pick(st.sampled_from([1, 1, 1, 1, 0, 2])) for _ in range(2)]
        numbers = [np.array([pick(number) for _ in range(size)], np.int64) for size in sizes]
        return [*numbers, np.zeros((2, 3), np.int32)]

    def body(*values: Any) -> Any:
        return stage_declared("step.ready", values)[0]

    types = [(I64, ["s"]), (I64, ["p"]), (I32, ["b", "w"])]
    return Case([[each] for each in types], body, draw)


@case
def next_step() -> Case:
    def draw(pick: Draw) -> list[Array]:
        batch, steps = pick(st.integers(0, 3)), pick(st.integers(0, 3))
        length = st.sampled_from([0, 5, 5, 5, 2**31, 2**32 - 2, 2**32 - 1])
        lengths = [pick(length) for _ in range(batch)]
        return [
            numbers(pick, [batch], np.int64), numbers(pick, [batch], np.uint64), numbers(pick, [batch, 2], np.int64),
            np.array([pick(st.integers(0, 1))], np.uint8), numbers(pick, [batch], np.int64),
            np.array(lengths, np.uint32),
            np.array([[1, pick(st.sampled_from([3, 2**32 - 1]))]], np.uint32), numbers(pick, [batch], np.uint64),
            numbers(pick, [steps, batch], np.int64), np.array([pick(index(steps))]), np.zeros(1, np.uint8),
        ]  # fmt: skip

    def body(*values: Any) -> None:
        stage_declared("next_step.ragged.paged", values)

    u8 = DType.uint8
    inputs = [(I64, ["b"]), (U64, ["b"]), (I64, ["b", 2]), (u8, [1])]
    buffers = [
        (I64, ["b"]),
        (U32, ["b"]),
        (U32, [1, 2]),
        (U64, ["b"]),
        (I64, ["s", "b"]),
        (I64, [1]),
        (u8, [1]),
    ]
    return Case([*inputs, *([b] for b in buffers)], body, draw)


@case
def gptq() -> Case:
    def draw(pick: Draw) -> list[Array]:
        rows, groups = pick(st.integers(0, 2)), 2
        words = np.random.default_rng(pick(st.integers(0, 3))).integers(-(2**31), 2**31, (2, 8))
        group = index(groups, np.int32).map(lambda g: g + groups if -groups <= g < 0 else g)
        group = st.integers(0, groups - 1) if pick(st.booleans()) else group
        g_idx = pick(st.lists(group, min_size=16, max_size=16))
        return [
            numbers(pick, [rows, 16]), words.astype(np.int32), numbers(pick, [groups, 1], np.int32),
            numbers(pick, [groups, 8]), np.array(g_idx, np.int32),
        ]  # fmt: skip

    def body(x: Any, weight: Any, zeros: Any, scales: Any, g_idx: Any) -> Any:
        attrs = {"bits": 4, "group_size": 8}
        return stage("qmatmul_gptq", (x, weight, zeros, scales, g_idx), attrs)

    types = [(F32, ["m", 16]), (I32, [2, 8]), (I32, [2, 1]), (F32, [2, 8]), (I32, [16])]
    return Case(types, body, draw)


PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM, LAYERS = 4, 2, 4, 8, 2
KV_TYPES = [
    [(F32, ["pages", 2, LAYERS, PAGE_SIZE, KV_HEADS, HEAD_DIM])],
    (U32, ["batch"]), (U32, ["batch", "table"]), (U32, ["steps", 2]), (U32, []),
]  # fmt: skip


def paged(draw: Draw) -> tuple[int, list[Array]]:
    """Rows of a ragged batch, offsets, cache, lengths, page table, maximum lengths and layer."""
    batch, rows = draw(st.integers(0, 3)), draw(st.integers(0, 7))
    rows = rows if batch else draw(st.sampled_from([0, 0, 0, 1]))
    pages, table = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    where = offsets(draw, batch, rows)
    odd = [0, PAGE_SIZE * table, PAGE_SIZE * table + 1, 2**31, 2**32 - 1]
    length = st.integers(0, 9).flatmap(
        lambda n: st.sampled_from(odd) if n == 0 else st.integers(0, max(PAGE_SIZE * table - 7, 0))
    )
    lengths = [draw(length) for _ in range(batch)]
    # sequences write to pages of their own: the order of writes is undefined
    order = draw(st.permutations(range(pages + 12)))[: batch * table]
    entries = [n % pages if pages and draw(st.integers(0, 15)) else n for n in order]
    if draw(st.booleans()) and pages < batch * table:
        pages = batch * table
        entries = draw(st.permutations(range(pages)))
    if draw(st.integers(0, 9)) == 0 and entries:
        at = draw(st.integers(0, len(entries) - 1))
        entries[at] = draw(st.sampled_from([pages, pages, pages, pages + 1, 2**31, 2**32 - 1]))
    layer = draw(st.sampled_from([0, 1, 1, 1, 1, 1, 1, 1, LAYERS, 2**31, 2**32 - 1]))
    blocks = np.random.default_rng(0).standard_normal(
        (pages, 2, LAYERS, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    )
    return rows, [
        where,
        blocks.astype(np.float32),
        np.array(lengths, np.uint32),
        np.array(entries, np.uint32).reshape(batch, table),
        np.array([[1, 1]], np.uint32),
        np.array(layer, np.uint32),
    ]


def distinct(arrays: Sequence[Array]) -> Sequence[Array]:
    """Makes the pages of a table distinct: the contents of a page that two sequences write to are undefined."""
    table = arrays[-3]
    flat = table.reshape(-1)
    seen: set[int] = set()
    for i, page in enumerate(flat):
        if int(page) in seen:
            flat[i] = 2**20 + i
        seen.add(int(page))
    return arrays


@case
def kv_store() -> Case:
    def draw(pick: Draw) -> Sequence[Array]:
        rows, cache = paged(pick)
        k, v = (numbers(pick, [rows, KV_HEADS * HEAD_DIM]) for _ in range(2))
        return distinct([k, v, *cache])

    def body(*values: Any) -> None:
        stage_declared("kv_store.ragged.paged", values)

    width = KV_HEADS * HEAD_DIM
    return Case(
        [(F32, ["total", width]), (F32, ["total", width]), (U32, ["o"]), *KV_TYPES], body, draw
    )


def rope_case(interleaved: bool) -> Case:
    def draw(pick: Draw) -> Sequence[Array]:
        rows, cache = paged(pick)
        freqs = numbers(pick, [pick(st.sampled_from([0, 6, 13, 40, 40])), HEAD_DIM]) / 8
        return distinct(
            [numbers(pick, [rows, HEADS, HEAD_DIM]), cache[0], freqs.astype(np.float32), *cache[1:]]
        )

    def body(q: Any, *values: Any) -> Any:
        return stage_declared("rope.ragged.paged", [q, *values], {"interleaved": interleaved})[0]

    types = [(F32, ["total", HEADS, HEAD_DIM]), (U32, ["o"]), (F32, ["positions", HEAD_DIM])]
    return Case([*types, *KV_TYPES], body, draw)


def attention_case(mask: str, window: int) -> Case:
    def draw(pick: Draw) -> Sequence[Array]:
        rows, cache = paged(pick)
        scale = np.array(pick(st.sampled_from([0.5, 0.5, -0.5, 0.0])), np.float32)
        return [numbers(pick, [rows, HEADS, HEAD_DIM]), *cache, scale]

    def body(q: Any, *values: Any) -> Any:
        attrs = {"mask": mask, "local_window_size": window}
        return stage_declared("attention.ragged.paged", [q, *values], attrs, [q.type])[0]

    types = [(F32, ["total", HEADS, HEAD_DIM]), (U32, ["o"]), *KV_TYPES, (F32, [])]
    return Case(types, body, draw)


CASES["rope"] = functools.partial(rope_case, True)
CASES["rope_halves"] = functools.partial(rope_case, False)
for _mask, _window in (("causal", -1), ("null", -1), ("sliding_window", 3), ("chunked_causal", 5)):
    CASES[f"attention_{_mask}"] = functools.partial(attention_case, _mask, _window)


def batch_of(
    excess: int,
    *,
    offset: int = 0,
    first: int = 0,
    length: int = 0,
    page: int = 0,
    layer: int = 0,
) -> list[Array]:
    """Two sequences of 2 and 3 rows that fill two pages each; the named input exceeds its bound by `excess`."""
    shape = (4, 2, LAYERS, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    return [
        np.array([first * excess, 2, 5 + offset * excess], np.uint32),
        np.random.default_rng(1).standard_normal(shape).astype(np.float32),
        np.array([6, 5 + length * excess], np.uint32),
        np.array([[1, 0], [2, 3 + page * excess]], np.uint32),
        np.array([[3, 8]], np.uint32),
        np.array(LAYERS - 1 + layer * excess, np.uint32),
    ]


def with_rows(name: str, cache: list[Array], positions: int = 8) -> list[Array]:
    """The inputs of a case over a cache."""
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 5, KV_HEADS * HEAD_DIM)).astype(np.float32)
    q = rng.standard_normal((5, HEADS, HEAD_DIM)).astype(np.float32)
    freqs = rng.standard_normal((positions, HEAD_DIM)).astype(np.float32)
    match name:
        case "kv_store":
            return [k, v, *cache]
        case "rope":
            return [q, cache[0], freqs, *cache[1:]]
        case _:
            return [q, *cache, np.array(0.5, np.float32)]


PAGED_CASES = ("kv_store", "rope", "attention_causal", "attention_null")
BEYOND = ("offset", "first", "length", "page", "layer")


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("what", BEYOND)
@pytest.mark.parametrize("name", PAGED_CASES)
def test_one_beyond_in_a_cache(name: str, what: str, end: bool) -> None:
    assert compare(name, with_rows(name, batch_of(0, **{what: 1})), end)
    assert not compare(name, with_rows(name, batch_of(1, **{what: 1})), end)


def test_one_position_beyond_the_rotations() -> None:
    assert compare("rope", with_rows("rope", batch_of(0)))
    assert not compare("rope", with_rows("rope", batch_of(0), positions=7))


def with_index(name: str, at: int) -> list[Array]:
    """The inputs of a case with axes of 3, an index among them."""
    x = np.arange(27, dtype=np.float32).reshape(3, 3, 3)
    flat = np.array([0, at])
    match name:
        case "gather_0_int64" | "gather_1_int64" | "gather_2_int64":
            return [x, flat]
        case "gather_nd_0_2":
            return [x[..., None], np.array([[0, 1], [2, at]])]
        case "scatter_1" | "scatter_add_1":
            return [x[0], x[1, :, :2].copy(), np.array([[0, 1], [2, 1], [1, at]])]
        case "scatter_nd_2_int64" | "scatter_nd_max":
            return [x, x[0, :2], np.array([[0, 1], [at, 2]])]
        case "scatter_set_constant":
            return [x[0].copy(), np.array([[0, 1], [at, 2]])]
        case _:
            return [x[0], np.array(at), np.array(1)]


INDEXED = (
    "gather_0_int64", "gather_1_int64", "gather_2_int64", "gather_nd_0_2", "scatter_1", "scatter_add_1",
    "scatter_nd_2_int64", "scatter_nd_max", "scatter_set_constant", "element",
)  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_one_index_beyond(name: str) -> None:
    for fits in (-3, -1, 0, 2):
        assert compare(name, with_index(name, fits))
    for beyond in (-4, 3, -(2**63), 2**63 - 1):
        assert not compare(name, with_index(name, beyond))


def test_an_element_out_of_range_is_an_index_error() -> None:
    x = np.zeros((3, 3), np.float32)
    for at in (3, -4, 2**63 - 2):
        with pytest.raises(IndexError, match=f"index {at} is out of range for axis 1 of size 3"):
            loaded_case("element")[2].execute(x, np.array(0), np.array(at))


@pytest.mark.parametrize(
    ("token", "offset", "fits"), [(3, 2, True), (4, 2, False), (-1, 2, False), (3, 3, False)]
)
def test_penalties_one_beyond(token: int, offset: int, fits: bool) -> None:
    logits = np.ones((2, 4), np.float32)
    data = np.array([[1, 2], [token, 1]], np.int32)
    assert compare("penalties", [logits, data, np.array([0, 1, offset], np.uint32)]) == fits


SAMPLED: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "temperature": ([0, -0.0, 1e-45, 3e38, np.inf], [-1e-45, -1, -np.inf, np.nan]),
    "top_k": ([-(2**63), -1, 0, 5, 6, 300, 2**62], []),
    "top_p": ([-0.0, 0, 1e-45, 1], [-1e-45, 1.0000001, np.nan, np.inf, -np.inf]),
    "min_p": ([-0.0, 0, 1e-45, 1], [-1e-45, 1.0000001, np.nan, np.inf, -np.inf]),
}


@pytest.mark.parametrize("what", SAMPLED)
def test_parameters_of_sampling(what: str) -> None:
    for fits, values in zip((True, False), SAMPLED[what], strict=True):
        for value in values:
            given = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, what: value}
            logits = np.array([[0, 3, -np.inf, 2, np.nan], [5, 5, 1, 2, 3]], np.float32)
            kinds = (np.float32, np.int64, np.float32, np.float32)
            each = [np.full(2, n, t) for n, t in zip(given.values(), kinds, strict=True)]
            assert compare("sampling", [logits, *each, np.arange(2, dtype=np.uint64)]) == fits, (
                value
            )


@pytest.mark.parametrize(
    "row", [[-np.inf] * 3, [np.nan] * 3, [np.inf] * 3, [np.nan, -np.inf, np.nan]], ids=str
)
@pytest.mark.parametrize("temperature", [0, 1, np.inf])
@pytest.mark.parametrize("top_k", [0, 2])
def test_rows_without_a_distribution(row: list[float], temperature: float, top_k: int) -> None:
    per_row = [
        np.array([n], t)
        for n, t in (
            (temperature, np.float32),
            (top_k, np.int64),
            (0.5, np.float32),
            (0, np.float32),
            (3, np.uint64),
        )
    ]
    assert compare("sampling", [np.array([row], np.float32), *per_row])


@pytest.mark.parametrize("name", ["repeat_interleave", "repeat_interleave_known"])
def test_repeats(name: str) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for repeats, total in (
        ([2, 0, 1], 3),
        ([0, 0, 0], 0),
        ([3, -1, 1], 3),
        ([-1, 1, 3], 3),
        ([2**62, 0, 1], 3),
    ):
        fits = min(repeats) >= 0 and sum(repeats) == total
        assert compare(name, [x, np.array(repeats), np.zeros(total, np.float32)]) == fits


@pytest.mark.parametrize("name", sorted(CASES))
def test_engine_and_interpreter_agree_or_both_raise(name: str) -> None:
    answered: list[bool] = []

    @settings(max_examples=40)
    @given(st.data(), st.booleans())
    def check(data: st.DataObject, end: bool) -> None:
        answered.append(compare(name, loaded_case(name)[0].draw(data.draw), end))

    check()
    # the generator must draw both valid and invalid inputs
    assert True in answered
    assert False in answered


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CASES))
def test_engine_and_interpreter_agree_or_both_raise_long(name: str) -> None:
    @settings(max_examples=1000)
    @given(st.data(), st.booleans())
    def check(data: st.DataObject, end: bool) -> None:
        compare(name, loaded_case(name)[0].draw(data.draw), end)

    check()
