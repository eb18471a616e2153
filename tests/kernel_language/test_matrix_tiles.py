"""Matrix tiles: plain Python, emulated code and NumPy agree; errors are reported; AMX code has AMX instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.runtime.jit import Compiler, Machine
from max._config import flags
from max.kernel.ir.nodes import Effect
from max.kernel.ir.spec import IRError, verify
from tests.kernel_language.harness import both, compiled, interpreted

BF16 = np.dtype(ml_dtypes.bfloat16)
PRODUCTS = [(k.bf16, k.bf16), (k.i8, k.i8), (k.i8, k.u8), (k.u8, k.i8), (k.u8, k.u8)]
AMX = k.CPUTarget(
    frozenset({"avx512f", "avx512bw", "avx512vl", "amx-bf16", "amx-int8"}),
    "x86_64-unknown-linux-gnu",
    "sapphirerapids",
)


@k.kernel
def products(
    out: k.Output,
    a: k.Input,
    b: k.Input,
    ctx: k.Context,
    *,
    shapes: tuple[tuple[int, int], ...],
    left: Any,
    right: Any,
    row: int,
    column: int,
) -> None:
    """Adds to `out` at (row, column) the product of the tiles there in `a` and `b`, and the same again."""
    tiles = k.matrix_tiles(shapes)
    for _ in ctx.parallel(1):
        tiles.configure()
        tiles.load(2, out, row, column)
        tiles.load(0, a, row, column)
        tiles.load(1, b, row, column)
        tiles.dot(2, 0, 1, left, right)
        tiles.dot(2, 0, 1, left, right)
        tiles.store(2, out, row, column)
        tiles.release()


def elements(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if dtype is k.bf16:
        return rng.standard_normal(shape).astype(BF16)
    return rng.integers(0, 256, shape).astype(np.uint8).view(dtype.numpy)


def product(a: np.ndarray, b: np.ndarray, group: int) -> np.ndarray:
    """The product of a and b, in whose rows `group` neighbors in k lie side by side."""
    steps, wide = b.shape
    plain = b.reshape(steps, wide // group, group).transpose(0, 2, 1).reshape(steps * group, -1)
    exact = np.int64 if group == 4 else np.float64
    return a.astype(exact) @ plain.astype(exact)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(PRODUCTS),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(0, 2**32),
)
def test_products(dtypes: tuple[Any, Any], m: int, n: int, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = 4 // dtypes[0].size
    row, column = rng.integers(0, 3), rng.integers(0, 3)
    a = elements(rng, (m + 5, steps * group + 7), dtypes[0])
    b = elements(rng, (steps + 4, n * group + 5), dtypes[1])
    sums = np.float32 if group == 2 else np.int32
    out = (rng.standard_normal((m + 3, n + 4)) * 10).astype(sums)
    params = {
        "shapes": ((m, 4 * steps), (steps, 4 * n), (m, 4 * n)),
        "left": dtypes[0],
        "right": dtypes[1],
        "row": int(row),
        "column": int(column),
    }
    # neither kernel nor NumPy round sums of products of bytes
    got = both(products, [out, a, b], params, rtol=1e-6, atol=1e-6)[0]
    want = out.astype(np.float64)
    here = slice(row, row + m), slice(column, column + n)
    inside = a[row : row + m, column : column + steps * group]
    right = b[row : row + steps, column : column + n * group]
    want[here] += 2 * product(inside, right, group)
    np.testing.assert_allclose(got, want, rtol=1e-4 if group == 2 else 0, atol=1e-4)


@k.kernel
def copies(
    out: k.Output[k.u8, 1], x: k.Input[k.u8, 1], ctx: k.Context, *, shape: tuple[int, int]
) -> None:
    """Tile by tile of flat rows, with a stride known at run time, on all workers."""
    tiles = k.matrix_tiles((shape,))
    tiles.configure()
    stride = shape[1] + x.shape[0] % 7
    step = stride * shape[0]
    for n in ctx.parallel(x.shape[0] // step):
        tiles.load(0, x, n * step, stride=stride)
        tiles.store(0, out, n * step, stride=stride)
    tiles.release()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("shape", [(16, 64), (3, 20), (1, 4)])
def test_strides(shape: tuple[int, int], num_workers: int) -> None:
    x = np.random.default_rng(0).integers(0, 256, 7001 + shape[0]).astype(np.uint8)
    out = np.zeros_like(x)
    got = both(copies, [out, x], {"shape": shape}, num_workers)[0]
    stride = shape[1] + len(x) % 7
    whole = len(x) // (stride * shape[0]) * shape[0] * stride
    want = x[:whole].reshape(-1, stride).copy()
    want[:, shape[1] :] = 0
    np.testing.assert_array_equal(got[:whole].reshape(-1, stride), want)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("k.matrix_tiles(())", "1 … 8 tiles"),
        ("k.matrix_tiles(((16, 64),) * 9)", "1 … 8 tiles"),
        ("k.matrix_tiles(((17, 64),))", "rows in 1 … 16"),
        ("k.matrix_tiles(((16, 6),))", "bytes in 4, 8, … 64"),
        ("for i in range(2): t.zero(i)", "known at compile time, got i64"),
        ("t.zero(3)", "tiles 0 … 2, got 3"),
        ("t.load(0, x, 0)", "2 indices"),
        ("t.load(0, flat, 0)", "stride="),
        ("t.load(0, x.transpose(1, 0), 0, 0)", "must be contiguous"),
        ("t.load(0, x, 1, 0)", "out of range"),
        ("t.load(0, x, 0, 17)", "out of range"),
        ("t.load(1, x.view(k.f64), 0, 0)", "whole elements"),
        ("t.store(0, x, 0, 0)", "cannot be written"),
        ("t.dot(0, 1, 2, k.f32)", "f32 by f32"),
        ("t.dot(0, 1, 2, k.i8)", "do not fit"),
    ],
)
def test_mistakes(line: str, message: str) -> None:
    source = f"""
def wrong(x: k.Input[k.f32, 2], flat: k.Input[k.f32, 1], ctx: k.Context):
    t = k.matrix_tiles(((16, 64), (4, 20), (5, 8)))
    t.configure()
    {line}
"""
    kernel = k.from_source(source, "wrong", {"k": k})
    specs = [k.TensorSpec(k.f32, (16, 32)), k.TensorSpec(k.f32, (512,))]
    with pytest.raises(k.KernelError, match=message):
        k.specialize(kernel, specs)
    if "at compile time" in message:
        return
    arrays = [np.zeros((16, 32), np.float32), np.zeros(512, np.float32)]
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        k.interpret(kernel, arrays)


def test_tiles_are_used_while_configured() -> None:
    tiles = k.matrix_tiles(((16, 64),))
    with pytest.raises(RuntimeError, match="configure"):
        tiles.zero(0)
    tiles.configure()
    tiles.zero(0)
    tiles.release()
    with pytest.raises(RuntimeError, match="release"):
        tiles.zero(0)


@pytest.mark.parametrize(("rows", "columns"), [(15, 20), (16, 15)])
def test_bounds(rows: int, columns: int) -> None:
    """What is too small is found in plain Python, and with bounds checks in compiled code."""
    params = {
        "shapes": ((16, 64), (16, 64), (16, 64)),
        "left": k.bf16,
        "right": k.bf16,
        "row": 0,
        "column": 0,
    }
    args = [np.zeros((rows, columns), np.float32), *[np.zeros((16, 32), BF16)] * 2]
    with pytest.raises(IndexError, match="out of range"):
        interpreted(products, args, params)
    with flags.override(MAX_KERNEL_CHECK=1), pytest.raises(IndexError, match="out of range"):
        compiled(products, args, params)


@pytest.mark.plain_code
def test_instructions() -> None:
    """Code for AMX: the configuration, the instructions, and the release, also where a kernel raises."""
    source = """
def some(out: k.Output[k.f32, 2], a: k.Input[k.bf16, 2], x: k.Input[k.u8, 2], ctx: k.Context):
    t = k.matrix_tiles(((16, 64), (16, 64), (16, 64), (8, 32)))
    t.configure()
    for i in ctx.parallel(a.shape[0] // 16):
        if a.shape[1] < 32:
            raise ValueError("too narrow: {}", a.shape[1])
        t.zero(0)
        t.load(1, a, 16 * i, 0)
        t.dot(0, 1, 2, k.bf16)
        t.dot(0, 1, 2, k.u8, k.i8)
        t.dot(0, 1, 2, k.i8, k.u8)
        t.dot(0, 1, 2, k.i8)
        t.dot(0, 1, 2, k.u8)
        t.store(0, out, 16 * i, 0)
    ctx.barrier()
    t.release()
"""
    kernel = k.from_source(source, "some", {"k": k})
    specs = [k.TensorSpec(dtype, (None, None)) for dtype in (k.f32, k.bf16, k.u8)]
    ir = k.specialize(kernel, specs, target=AMX)
    verify(ir)
    text = Compiler(Machine.of(AMX)).assembly(k.emit_llvm(ir, AMX))
    for name in ("tdpbf16ps", "tdpbusd", "tdpbsud", "tdpbssd", "tdpbuud", "ldtilecfg", "tilezero"):
        assert text.count(f"\t{name}\t") == 1, name
    assert text.count("tileloadd") == text.count("tilestored") == 1
    # at the end, where the kernel raises, where another worker did, and where the run is interrupted: after a turn, and
    # a chunk
    assert k.emit_llvm(ir, AMX).count("call void @llvm.x86.tilerelease()") == 5
    assert "tilerelease" in text
    data = text[text.index("tiles0:") :]
    assert data.count("\\020\\020\\020\\b") == 1 and data.count("@\\000@\\000@\\000 \\000") == 1
    emulated = replace(AMX, features=AMX.features | {"amx-emulated"})
    assert emulated.tile_products and not emulated.tile_instructions
    text = Compiler(Machine.of(emulated)).assembly(k.emit_llvm(ir, emulated))
    assert "tdpbf16ps\t" not in text and "tile_tdpbf16ps" in text


def test_verifier() -> None:
    spec = k.TensorSpec(k.u8, (None,))
    ir = k.specialize(copies, [spec, spec], {"shape": (1, 4)})
    broken = Effect("tile_load", (), (0, 1, 4), 1)
    with pytest.raises(IRError, match="do not fit"):
        verify(replace(ir, body=(broken,)))
