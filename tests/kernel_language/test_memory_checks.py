"""``MAX_KERNEL_CHECK=2``: every load and store against the memory of the tensor that it belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max._backends.program import KernelRunError
from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.kernel_language.harness import compiled, interpreted


@k.kernel
def claims(out: k.Output, x: k.Input, n: k.i64, m: k.i64, *, what="", W=4):
    """What lies beyond ``x`` and ``out`` is reached through views that claim more than there is."""
    if what == "read":
        wide = x.transpose(1, 0)
        out[0, 0] = wide[m, n]
    elif what == "write":
        part = out[1:2]
        part[m, n] = 1.0
    elif what == "vector":
        out.store(0, 0, value=x.load(m, n, width=W))
    elif what == "masked":
        mask = k.iota(k.i64, W) < 3
        out.store(0, 0, value=x.load(m, n, width=W, mask=mask), mask=mask)
    elif what == "masked write":
        mask = k.iota(k.i64, W) >= 3
        out.store(m, n, value=k.splat(x[0, 0], W), mask=mask)
    elif what == "strided":
        out.store(0, 0, value=x.load(m, n, width=W, axis=0))
    elif what == "strided write":
        out.store(m, n, value=k.splat(x[0, 0], W), axis=0)
    elif what == "gather":
        lanes = k.iota(k.i64, W) * 5 + n
        mask = k.iota(k.i64, W) < 2
        out.store(0, 0, value=x[m].gather(lanes, mask=mask))
    elif what == "scatter":
        out[m].scatter(k.iota(k.i32, W) - k.i32(n), k.splat(x[0, 0], W))
    elif what == "atomic":
        out.atomic_add(m, n, value=1.0)
    elif what == "other type":
        out[0, 0] = k.f32(x.view(k.u8)[m, n])


# (the kernel's branch, an access that fits, one that does not, kind, bytes, byte offset)
CASES = [
    ("read", (3, 4), (4, 0), "read", 4, 80),
    ("read", (0, 0), (0, -1), "read", 4, -4),
    ("write", (4, 2), (0, 3), "write", 4, 80),
    ("vector", (1, 3), (2, 3), "read", 16, 68),
    ("masked", (2, 3), (3, 3), "read", 4, 80),
    ("masked write", (1, 3), (2, 3), "write", 4, 80),
    ("strided", (4, 0), (5, 0), "read", 4, 80),
    ("strided write", (0, 0), (0, 1), "write", 4, 80),
    ("gather", (4, 2), (5, 2), "read", 4, 80),
    ("scatter", (0, 0), (1, 0), "write", 4, -4),
    ("atomic", (4, 3), (4, 4), "write", 4, 96),
    ("other type", (19, 3), (20, 3), "read", 1, 80),
]


def arguments(n: int, m: int) -> list[Any]:
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    return [np.zeros((4, 5), np.float32), x, np.int64(n), np.int64(m)]


@pytest.fixture
def only_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks of indices, which would come first."""
    from max.kernel.frontend.views import elements as view_elements
    from max.kernel.frontend.views import methods as view_methods

    for module in (view_elements, view_methods):
        monkeypatch.setattr(module, "check_indices", lambda *args, **kwargs: None)
    monkeypatch.setattr(view_elements, "_lane_indices", unchecked(view_elements._lane_indices))


def unchecked(function: Any) -> Any:
    def without(fe: Any, *args: Any) -> Any:
        level, fe.check = fe.check, 0
        try:
            return function(fe, *args)
        finally:
            fe.check = level

    return without


@pytest.mark.parametrize(
    ("what", "good", "bad", "kind", "size", "offset"), CASES, ids=[f"{c[0]} {c[5]}" for c in CASES]
)
@pytest.mark.parametrize("static", [False, True], ids=["sizes at run time", "static"])
@pytest.mark.usefixtures("only_memory")
def test_an_access_beyond_the_memory(what, good, bad, kind, size, offset, static):
    with flags.override(MAX_KERNEL_CHECK=2):
        compiled(claims, arguments(*good), {"what": what}, static=static)
        with pytest.raises(IndexError) as raised:
            compiled(claims, arguments(*bad), {"what": what}, static=static)
    assert isinstance(raised.value, KernelRunError)
    view, unit = "x" if kind == "read" else "out", "byte" if size == 1 else "bytes"
    wanted = f"{view}: {kind} of {size} {unit} at byte {offset}, which is outside of its 80 bytes"
    assert wanted in str(raised.value)
    assert f"({__file__}:" in str(raised.value) and "in kernel claims)" in str(raised.value)


@k.kernel
def last_row(out: k.Output, x: k.Input, *, W=8):
    """Whole vectors, also beyond the end of the last row."""
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], W):
            out.store(i, j, value=x.load(i, j, width=W))


@k.kernel
def tails(out: k.Output, x: k.Input, *, W=8):
    for i in range(x.shape[0]):
        for j, mask in k.vectors(x.shape[1], W):
            out.store(i, j, value=x.load(i, j, width=W, mask=mask), mask=mask)


@pytest.mark.parametrize("columns", [1, 7, 8, 9])
@pytest.mark.usefixtures("only_memory")
def test_the_end_of_the_last_row(columns):
    x = np.ones((3, columns), np.float32)
    with flags.override(MAX_KERNEL_CHECK=2):
        compiled(tails, [np.zeros_like(x), x])
        if columns == 8:
            compiled(last_row, [np.zeros_like(x), x])
            return
        with pytest.raises(IndexError, match=r"x: read of 32 bytes at byte \d+"):
            compiled(last_row, [np.zeros_like(x), x])


@k.kernel
def scratch(out: k.Output, n: k.i64, ctx: k.Context):
    a = ctx.scratch(k.f32, (4,))
    b = ctx.scratch(k.f32, (4, 2))
    a[n] = 1.0
    b[0, 0] = 2.0
    out[0] = k.select(n > 2, a, b.reshape(8))[n]


@pytest.mark.usefixtures("only_memory")
def test_scratch_memory_and_chosen_views():
    with flags.override(MAX_KERNEL_CHECK=2):
        compiled(scratch, [np.zeros(1, np.float32), np.int64(3)])
        with pytest.raises(
            IndexError, match="scratch: write of 4 bytes at byte 16, .* its 16 bytes"
        ):
            compiled(scratch, [np.zeros(1, np.float32), np.int64(4)])


@k.kernel
def tile_rows(out: k.Output[k.bf16, 2], x: k.Input[k.bf16, 2], i: k.i64):
    tiles = k.matrix_tiles(((4, 32),))
    tiles.configure()
    tiles.load(0, x, i, 0)
    tiles.store(0, out, 0, 0)
    tiles.release()


def test_matrix_tiles(monkeypatch: pytest.MonkeyPatch):
    import max.kernel.frontend.functions.matrix_tiles as handlers

    monkeypatch.setattr(handlers, "check_indices", lambda *args, **kwargs: None)
    x = np.zeros((5, 16), np.uint16).view(k.bf16.numpy)
    with flags.override(MAX_KERNEL_CHECK=2):
        compiled(tile_rows, [x[:4].copy(), x, np.int64(1)])
        with pytest.raises(IndexError, match="x: read of 32 bytes at byte 160, .* its 160 bytes"):
            compiled(tile_rows, [x[:4].copy(), x, np.int64(2)])
        with pytest.raises(IndexError, match="out: write of 32 bytes at byte 96"):
            compiled(tile_rows, [x[:3].copy(), x, np.int64(1)])


@pytest.mark.plain_code
def test_one_check_for_a_read_and_a_write_of_one_element():
    @k.kernel
    def add(out: k.InOut, n: k.i64):
        out[n] += 1.0
        out[n] += 1.0

    specs = [k.TensorSpec(k.f32, (None,)), k.i64]
    with flags.override(MAX_KERNEL_CHECK=2):
        ir = k.specialize(add, specs)
    assert [m.text.count("bytes of memory") for m in ir.messages] == [0, 1]  # an index, a place
    assert [s.kind for s in ir.slots] == ["pointer", "dim", "begin", "end", "scalar"]
    assert [s.kind for s in k.specialize(add, specs).slots] == ["pointer", "dim", "scalar"]


# ***** through the engine *****
@k.register("test.reads_beyond")
def reads_beyond(out: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context, *, by=0):
    for i in ctx.parallel(out.shape[0]):
        out[i] = x.reshape(1, -1)[0, i:][by]


@pytest.mark.parametrize("source", ["input", "temporary", "weight", "part"])
def test_each_tensor_of_a_program_has_its_own_memory(source):
    cpu = DeviceRef.CPU()
    vector = TensorType(DType.float32, ["n"], cpu)
    values = np.arange(6, dtype=np.float32)

    def load(by: int) -> Any:
        with Graph("beyond", input_types=[vector]) as graph:
            x = graph.inputs[0].tensor
            if source == "temporary":
                x = ops.cumsum(x)
            elif source == "weight":
                x = ops.constant(values, device=cpu)
            elif source == "part":
                x = ops.concat([x, x])[:6]
            static = source in ("weight", "part")
            result = TensorType(DType.float32, [6 if static else "n"], cpu)
            y = ops.custom("test.reads_beyond", cpu, [x], [result], parameters={"by": by})[0]
            graph.output(y * 2, ops.cumsum(x))
        return InferenceSession(devices=[CPU()]).load(graph)

    with flags.override(MAX_KERNEL_CHECK=2):
        first = load(0).execute(values)[0].to_numpy()
        expected = np.cumsum(values) if source == "temporary" else values
        np.testing.assert_array_equal(first, 2 * expected)
        if source == "part":
            return
        with pytest.raises(IndexError, match="test.reads_beyond: x: .*reads_beyond"):
            load(1).execute(values)


def test_what_the_interpreter_refuses_too():
    with pytest.raises(IndexError):
        interpreted(claims, arguments(5, 3), {"what": "read"})
