"""Products in emulated AMX tiles against the paths without tiles, NumPy and the interpreter, and the code for
processors with AMX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.kernels import library
from max._backends.cpu.kernels.products.dense.packed_matmul import ROW_THRESHOLD
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._backends.cpu.runtime.jit import Compiler, Machine
from max._backends.kernel_call import Arg, Operand
from max._config import flags
from max.dtype import DType
from max.dtype.blocks import decode
from tests.cpu_kernels.harness import Runner, interpreted, run
from tests.cpu_kernels.test_attention import check as check_paged
from tests.cpu_kernels.test_attention import make_cache
from tests.cpu_kernels.test_int8_matmul import check as check_int8
from tests.quantized import assert_product, random_weight
from tests.tolerance import assert_close

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
TILES = "tiles host"
STREAMED = {"streamed": False}


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random bf16 elements, aligned to 2 bytes only."""
    flat = rng.standard_normal(int(np.prod(shape)) + 1).astype(BF16)
    return flat[1:].reshape(shape)


def packed_panels(w: np.ndarray, by_rows: bool) -> np.ndarray:
    columns, inner = w.shape if by_rows else w.shape[::-1]
    shape = (-(-columns // 32), panel_elements(inner))
    encoding = {"encoding": "rows" if by_rows else "columns"}
    runner = Runner("mok.pack", [w], [(BF16, shape)], encoding)
    runner.results[0][...] = np.nan  # NaN would show padding that is not written
    return runner()[0]


def packed_groups(w: np.ndarray, inner: int, encoding: str) -> np.ndarray:
    shape = (-(-w.shape[0] // 32), FORMATS[encoding].group_bytes(inner))
    return run("mok.pack", [w], [(np.uint8, shape)], {"encoding": encoding})[0].copy()


@settings(max_examples=7, deadline=None)
@given(
    st.integers(ROW_THRESHOLD + 1, 300),
    st.integers(1, 170),
    st.integers(0, 600),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(0, 2**32),
)
def test_panels(m: int, n: int, inner: int, by_rows: bool, workers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, w = random(rng, m, inner), random(rng, *((n, inner) if by_rows else (inner, n)))
    panels = packed_panels(w, by_rows)
    attributes = {"encoding": "rows", **STREAMED}
    right = (w.T if by_rows else w).astype(np.float64)
    want = (a.astype(np.float64) @ right).astype(F32)
    dtype = BF16 if seed % 2 else F32
    results = [(dtype, (m, n))]
    options = {"workers": workers, "machine": TILES}
    (got,) = run("mok.packed_matmul", [a, panels], results, attributes, **options)
    (plain,) = run("mok.packed_matmul", [a, panels], results, attributes, workers=workers)
    assert_close(got, want, dtype, scale=4)
    assert_close(got, plain, dtype, scale=4)


def test_panels_are_padded_with_zeros() -> None:
    """The padding of a panel is zeros, not NaN."""
    w = random(np.random.default_rng(0), 45, 37)
    for by_rows in (True, False):
        panels = packed_panels(w if by_rows else w.T.copy(), by_rows)
        rows = panels.reshape(2, -1, 32, 2)
        assert not rows[:, 19:].astype(F32).any() and not rows[:, 18, :, 1].astype(F32).any()


@k.inline
def add_and_relu(v: Any, row: Any, col: Any, mask: Any, extra: Any) -> Any:
    bias = extra[0].load(col, width=v.width, mask=mask)
    other = extra[1].load(row, col, width=v.width, mask=mask)
    return k.max(v + bias + other, 0.0)


def test_epilogue() -> None:
    rng = np.random.default_rng(1)
    m, n, inner = 75, 83, 290
    a, w = random(rng, m, inner), random(rng, n, inner)
    bias, residual = rng.standard_normal(n).astype(F32), rng.standard_normal((m, n)).astype(F32)
    product = a.astype(np.float64) @ w.astype(np.float64).T
    (got,) = run(
        "mok.packed_matmul",
        [a, packed_panels(w, True)],
        [(F32, (m, n))],
        {"encoding": "rows", **STREAMED},
        machine=TILES,
        params={"epilogue": add_and_relu},
        extra=[bias, residual],
    )
    assert_close(got, np.maximum(product + bias + residual, 0).astype(F32), scale=4)


def test_several_products() -> None:
    """One launch: first two results, then two products in the same strips."""
    rng = np.random.default_rng(2)
    m, inner, parts = 37, 70, ((1, 1), (1, 1), (2, 2))
    x, panels = random(rng, m, inner), random(rng, 6, panel_elements(inner))
    attributes = {"encoding": "rows", "parts": parts, **STREAMED}
    results = [(F32, (m, 5)), (BF16, (m, 33)), (F32, (m, 40)), (F32, (m, 40))]
    got = run("mok.packed_products", [x, panels], results, attributes, machine=TILES)
    plain = run("mok.packed_products", [x, panels], results, attributes)
    for ours, theirs in zip(got, plain, strict=True):
        assert_close(ours, theirs, scale=4)


def test_results_do_not_depend_on_the_number_of_workers() -> None:
    rng = np.random.default_rng(3)
    a, panels = random(rng, 200, 700), random(rng, 5, panel_elements(700))
    attributes = {"encoding": "rows", **STREAMED}
    got = [
        run("mok.packed_matmul", [a, panels], [(F32, (200, 150))], attributes, machine=TILES, workers=n)[0].copy()
        for n in (1, 2, 3)
    ]  # fmt: skip
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[0], got[2])


@settings(max_examples=6, deadline=None)
@given(
    st.integers(17, 600),
    st.integers(1, 90),
    st.integers(0, 600),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(1, 2),
)
def test_matmul(m: int, n: int, inner: int, by_rows: bool, workers: int, batch: int) -> None:
    """Products of two inputs."""
    rng = np.random.default_rng(m * 1000 + n)
    a, b = (
        random(rng, batch, m, inner),
        random(rng, batch, *((n, inner) if by_rows else (inner, n))),
    )
    results, attributes = [(F32, (batch, m, n))], {"transpose_b": by_rows}
    (got,) = run("mo.matmul", [a, b], results, attributes, machine=TILES, workers=workers)
    right = (b.swapaxes(1, 2) if by_rows else b).astype(np.float64)
    assert_close(got, (a.astype(np.float64) @ right).astype(F32), scale=4)


@pytest.mark.parametrize("encoding", FORMATS)
@settings(max_examples=2, deadline=None)
@given(st.integers(33, 300), st.integers(1, 100), st.integers(1, 5), st.sampled_from([1, 2]))
def test_quantized(encoding: str, m: int, n: int, units: int, workers: int) -> None:
    rng = np.random.default_rng(m * 1000 + n)
    inner = units * FORMATS[encoding].super_block
    x = rng.standard_normal((m, inner)).astype(F32)
    w = random_weight(rng, n, inner, encoding)
    groups = packed_groups(w, inner, encoding)
    attributes, results = {"encoding": encoding, **STREAMED}, [(F32, (m, n))]
    options = {"workers": workers, "machine": TILES}
    (got,) = run("mok.packed_matmul", [x, groups], results, attributes, **options)
    # sums of a block are exact, and blocks are added in the same order
    (plain,) = run("mok.packed_matmul", [x, groups], results, attributes, workers=workers)
    np.testing.assert_array_equal(got, plain)
    assert_product(got, x, decode(w, encoding), scale=8)


SMALL: dict[str, tuple[list[np.ndarray], tuple[int, int], str]] = {}
_rng = np.random.default_rng(4)
for _m, _n, _inner in ((9, 20, 33), (45, 40, 290)):
    _operands = [random(_rng, _m, _inner), random(_rng, 2, panel_elements(_inner))]
    SMALL[f"panels {_m} {_n} {_inner}"] = (_operands, (_m, _n), "rows")
for _encoding, _inner in (("Q4_0", 64), ("Q6_K", 256)):
    _bytes = (1, FORMATS[_encoding].group_bytes(_inner))
    _operands = [
        _rng.standard_normal((18, _inner)).astype(F32),
        _rng.integers(0, 60, _bytes).astype(np.uint8),
    ]
    SMALL[_encoding] = (_operands, (18, 30), _encoding)


@pytest.mark.parametrize("name", SMALL)
def test_interpreted_and_bounds(name: str) -> None:
    """The interpreter and code compiled with checks check every index."""
    operands, shape, encoding = SMALL[name]
    attributes, results = {"encoding": encoding, **STREAMED}, [(F32, shape)]
    (got,) = run("mok.packed_matmul", operands, results, attributes, machine=TILES)
    (plain,) = interpreted("mok.packed_matmul", operands, results, attributes, machine=TILES)
    assert_close(got, plain)
    with flags.override(MAX_KERNEL_CHECK=1):
        (checked,) = run("mok.packed_matmul", operands, results, attributes, machine=TILES)
    np.testing.assert_array_equal(got, checked)


@settings(max_examples=6, deadline=None)
@given(
    st.integers(9, 300),
    st.integers(1, 100),
    st.integers(1, 1300),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_int8(m: int, n: int, inner: int, by_rows: bool, workers: int) -> None:
    check_int8(m, n, inner, by_rows, workers=workers, machine=TILES)


def dense(
    rng: np.random.Generator, rows: int, size: int, keys: int, width: int
) -> list[np.ndarray]:
    shapes = ((2, 3, rows, size), (2, keys, size), (2, keys, width))
    return [random(rng, *shape) for shape in shapes]


@settings(max_examples=2, deadline=None)
@given(
    st.integers(17, 300),
    st.integers(1, 130),
    st.integers(1, 700),
    st.integers(1, 130),
    st.sampled_from([1, 2]),
)
def test_dense_attention(rows: int, size: int, keys: int, width: int, workers: int) -> None:
    operands = dense(np.random.default_rng(rows * 1000 + keys), rows, size, keys, width)
    q, right, values = (x.astype(np.float64) for x in operands)
    results, attributes = (
        [(BF16, (2, 3, rows, width))],
        {"scale": size**-0.5, "fills": (), "columns": False},
    )
    scores = np.einsum("bgqd,bkd->bgqk", q, right) * size**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bgqk,bkv->bgqv", weights / weights.sum(-1, keepdims=True), values)
    (got,) = run("mok.attention", operands, results, attributes, machine=TILES, workers=workers)
    assert_close(got, want.astype(BF16))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "workers"), [(6, 2, 64, 2), (3, 3, 24, 1), (16, 1, 33, 2)]
)
def test_paged_attention(heads: int, kv_heads: int, size: int, workers: int) -> None:
    cache = make_cache(
        [(0, 19), (70, 1), (3, 50), (200, 2), (131, 17)], heads, kv_heads, size, 32, BF16
    )
    for mask, window in (("causal", -1), ("sliding_window", 7)):
        check_paged(cache, mask, window, machine=TILES, workers=workers)


OTHERS = {
    "matmul": (
        "mo.matmul", [random(np.random.default_rng(6), 1, *shape) for shape in ((35, 45), (45, 40))],
        [(F32, (1, 35, 40))], {},
    ),
    "int8": (
        "mok.packed_matmul",
        [
            np.random.default_rng(8).integers(-128, 128, (17, 38)).astype(np.int8),
            np.random.default_rng(9).integers(0, 256, (2, panel_elements(38))).astype(np.uint8),
        ],
        [(np.int32, (17, 40))], {"encoding": "int8 rows", **STREAMED},
    ),
    "matmul by rows": (
        "mo.matmul", [random(np.random.default_rng(7), 1, *shape) for shape in ((35, 35), (40, 35))],
        [(F32, (1, 35, 40))], {"transpose_b": True},
    ),
    "dense": (
        "mok.attention", dense(np.random.default_rng(5), 6, 33, 37, 9),
        [(BF16, (2, 3, 6, 9))], {"scale": 0.2, "fills": (), "columns": False},
    ),
    "paged": (
        "mo.attention.ragged.paged", make_cache([(3, 4), (0, 13)], 6, 2, 16, 16, BF16).operands(0.3),
        [(BF16, (17, 6, 16))], {"mask": "causal"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels_interpreted(name: str) -> None:
    symbol, operands, results, attributes = OTHERS[name]
    (got,) = run(symbol, operands, results, attributes, machine=TILES)
    (plain,) = interpreted(symbol, operands, results, attributes, machine=TILES)
    assert_close(got, plain)
    with flags.override(MAX_KERNEL_CHECK=1):
        (checked,) = run(symbol, operands, results, attributes, machine=TILES)
    np.testing.assert_array_equal(got, checked)


# code for a processor with AMX; this one may lack it
SAPPHIRE_RAPIDS = k.CPUTarget(
    frozenset({
        "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "avx512vnni", "avx512fp16", "amx-bf16", "amx-int8",
    }),
    "x86_64-unknown-linux-gnu",
    "sapphirerapids",
)  # fmt: skip


def code_of(
    name: str,
    operands: Sequence[tuple[DType, tuple[Any, ...]]],
    results: Sequence[tuple[DType, tuple[Any, ...]]],
    attributes: Mapping[str, Any],
) -> str:
    described = [[Operand(*x) for x in group] for group in (operands, results)]
    call = library.CPU_KERNELS.lower(name, described[0], described[1], attributes, SAPPHIRE_RAPIDS)
    specs = [
        k.TensorSpec(arg.dtype, arg.spec_shape()) if isinstance(arg, Arg) else k.i64
        for arg in call.args
    ]
    ir = k.specialize(call.kernel, specs, call.params, SAPPHIRE_RAPIDS)
    text = k.emit_llvm(ir, SAPPHIRE_RAPIDS)
    return Compiler(Machine.of(SAPPHIRE_RAPIDS)).assembly(text)


def assembly(encoding: str, dtype: DType) -> str:
    inner = 512
    if encoding == "rows":
        weight = (DType.bfloat16, (3, panel_elements(inner)))
    else:
        weight = (DType.uint8, (3, FORMATS[encoding].group_bytes(inner)))
    attributes = {"encoding": encoding, **STREAMED}
    operands = [(dtype, (100, inner)), weight]
    return code_of("mok.packed_matmul", operands, [(DType.float32, (100, 70))], attributes)


def inner_loops(text: str) -> list[list[str]]:
    """The instructions of the innermost loops."""
    lines = [line.strip() for line in text.split("\n")]
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.\w+):", line))}
    loops: list[list[str]] = []
    for i, line in enumerate(lines):
        jump = re.match(r"j\w+\s+(\.\w+)", line)
        if jump and labels.get(jump[1], i) < i:
            body = lines[labels[jump[1]] + 1 : i]
            if not any(re.match(r"\.\w+:", inside) for inside in body):
                loops.append(body)
    return loops


@pytest.mark.plain_code
def test_code_of_panels() -> None:
    text = assembly("rows", DType.bfloat16)
    assert text.count("ldtilecfg") == 1 and "tilerelease" in text and "vdpbf16ps" in text
    loops = [loop for loop in inner_loops(text) if any("tdpbf16ps" in line for line in loop)]
    products = [sum("tdpbf16ps" in line for line in loop) for loop in loops]
    assert sorted(products) == [
        2,
        2,
        2,
        4,
        4,
        4,
    ]  # 16 and 32 rows; no, few and many prefetches
    for loop, count in zip(loops, products, strict=True):
        order = [line.split("\t")[0] for line in loop if line.startswith(("tile", "tdp"))]
        step = ["tileloadd", "tileloadd", "tdpbf16ps", "tileloadd", "tdpbf16ps"]
        assert order == [*step, *(["tileloadd", "tdpbf16ps", "tdpbf16ps"] if count == 4 else [])]
        # an address may be computed again
        assert not [line for line in loop if re.search(r"zmm|, -?\d*\(%rsp\)$", line)], "spills"
    assert {sum("prefetcht1" in line for line in loop) for loop in loops} == {0, 4, 32}


@pytest.mark.plain_code
@pytest.mark.parametrize("encoding", ["Q4_K", "Q6_K", "Q8_0"])
def test_code_of_quantized(encoding: str) -> None:
    text = assembly(encoding, DType.float32)
    assert text.count("ldtilecfg") == 1 and "tilerelease" in text and "vpdpbusd" in text
    (loop,) = [loop for loop in inner_loops(text) if any("tdpbssd" in line for line in loop)]
    assert (
        sum("tdpbssd" in line for line in loop) == sum("tilestored" in line for line in loop) == 2
    )
    scaling = [
        loop
        for loop in inner_loops(text)
        if sum("vcvtdq2ps" in line for line in loop) == (8 if FORMATS[encoding].affine else 16)
        and any("vcvtdq2ps" in line and "(%r" in line for line in loop)
    ]
    assert scaling
    for body in [loop, scaling[0]]:
        # an address may be loaded again
        assert not [line for line in body if re.search(r"mm.*\(%rsp\)|, -?\d*\(%rsp\)$", line)]


@pytest.mark.plain_code
def test_code_of_attention() -> None:
    b, u = DType.bfloat16, DType.uint32
    plain = {"scale": 0.1, "fills": (), "columns": False}
    operands = [(b, (2, 4, 256, 64)), (b, (2, 256, 64)), (b, (2, 256, 64))]
    texts = [code_of("mok.attention", operands, [(b, (2, 4, 256, 64))], plain)]
    operands = [
        *[(b, ("tokens", 9, 64)), (u, ("ends",)), (b, ("pages", 2, 1, 128, 3, 64))],
        *[(u, ("batch",)), (u, ("batch", "most")), (u, ("steps", 2)), (u, ()), (DType.float32, ())],
    ]
    results = [(b, ("tokens", 9, 64))]
    texts.append(code_of("mo.attention.ragged.paged", operands, results, {"mask": "causal"}))
    for text in texts:
        assert text.count("ldtilecfg") == 1 and "tilerelease" in text
        loops = [loop for loop in inner_loops(text) if any("tdpbf16ps" in line for line in loop)]
        assert [sum("tdpbf16ps" in line for line in loop) for loop in loops] == [2, 2]
        assert not [line for loop in loops for line in loop if "(%rsp)" in line], "spills"


@pytest.mark.plain_code
def test_code_of_matmul() -> None:
    b = DType.bfloat16
    results = [(DType.float32, (1, 300, 300))]
    operands = [(b, (1, 300, 512)), (b, (1, 300, 512))]
    text = code_of("mo.matmul", operands, results, {"transpose_b": True})
    assert text.count("ldtilecfg") == 1 and "tilerelease" in text
    loops = [loop for loop in inner_loops(text) if any("tdpbf16ps" in line for line in loop)]
    assert sorted(sum("tdpbf16ps" in line for line in loop) for loop in loops) == [2, 4]
    assert not [line for loop in loops for line in loop if "(%rsp)" in line], "spills"


@pytest.mark.plain_code
def test_code_of_int8() -> None:
    operands = [(DType.int8, (100, 512)), (DType.uint8, (3, panel_elements(512)))]
    attributes = {"encoding": "int8 rows", **STREAMED}
    text = code_of("mok.packed_matmul", operands, [(DType.int32, (100, 70))], attributes)
    assert text.count("ldtilecfg") == 1 and "tilerelease" in text
    loops = [loop for loop in inner_loops(text) if any("tdpbsud" in line for line in loop)]
    assert [sum("tdpbsud" in line for line in loop) for loop in loops] == [2, 2]
    assert {sum("prefetcht1" in line for line in loop) for loop in loops} == {0, 32}
    for loop in loops:
        assert not [line for line in loop if re.search(r"zmm|, -?\d*\(%rsp\)$", line)], "spills"
