"""Prefetches of dense weights, on the processors whose hardware prefetchers do not keep up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from max import kernel as k
from max._backends.cpu.kernels.library import CPU_KERNELS
from max._backends.cpu.kernels.products.dense.coded import coded_bytes
from max._backends.cpu.kernels.products.dense.panels import gemv_passes, panel_elements
from max._backends.cpu.kernels.products.streams import (
    BYTES,
    ELEMENTS,
    stream_distances,
)
from max._backends.cpu.runtime.llvm_compiler import Compiler, Machine
from max._backends.kernel_call import Arg, Operand
from max.dtype import DType
from max.kernel.types import scalar_type
from tests.cpu_kernels.test_amx import inner_loops

FEATURES = frozenset(
    {
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512vnni",
        "avx512bf16",
        "avx512vbmi",
    }
)
INNER = 512


def loops_of(dtype: DType, encoding: str, name: str) -> list[list[str]]:
    """The inner loops of a product with packed panels that multiply."""
    target = k.CPUTarget(FEATURES, "x86_64-unknown-linux-gnu", name)
    elements = DType.uint8 if encoding == "int8 rows" else dtype
    result = DType.int32 if encoding == "int8 rows" else DType.float32
    size = panel_elements(INNER)
    weight = Operand(elements, (3, size))
    if encoding.startswith("coded"):
        weight = Operand(DType.uint8, (3, coded_bytes(size, dtype)))
    attributes: Mapping[str, Any] = {"encoding": encoding, "columns": 70, "streamed": True}
    operands = [Operand(dtype, (5, INNER)), weight]
    call = CPU_KERNELS.lower(
        "mok.packed_matmul", operands, [Operand(result, (5, 70))], attributes, target
    )
    specs = [
        k.TensorSpec(scalar_type(arg.dtype), arg.spec_shape()) if isinstance(arg, Arg) else k.i64
        for arg in call.args
    ]
    ir = k.specialize(call.kernel, specs, call.params, target)
    text = Compiler(Machine.of(target)).assembly(k.emit_llvm(ir, target))
    products = ("vfmadd", "vdpbf16ps", "vpdpbusd")
    return [x for x in inner_loops(text) if any(p in line for line in x for p in products)]


def displacement(line: str) -> int:
    """The constant of an operand in memory."""
    found = re.search(r"(-?\d*)\(", line)
    assert found is not None
    return int(found[1] or 0)


@pytest.mark.plain_code
@pytest.mark.parametrize(
    ("dtype", "encoding"),
    [(DType.float32, "rows"), (DType.bfloat16, "rows"), (DType.int8, "int8 rows")],
)
@pytest.mark.parametrize("name", ["sapphirerapids", "znver5"])
def test_loops_over_a_panel_prefetch_each_line_twice(
    dtype: DType, encoding: str, name: str
) -> None:
    form = BYTES if encoding == "int8 rows" else ELEMENTS
    distances = stream_distances(k.CPUTarget(FEATURES, "x86_64", name), 1, form)
    assert distances is not None
    near, far = distances.near, distances.far
    assert 0 < near < far
    passes = 0
    for loop in loops_of(dtype, encoding, name):
        into_l1 = [line for line in loop if "prefetcht0" in line]
        into_l2 = [line for line in loop if "prefetcht1" in line]
        # register tiles of the GEMM path prefetch into the L2 cache only
        if into_l1:
            passes += 1
            # a row of lanes of 32 columns: two lines
            assert [len(into_l1), len(into_l2)] == [2, 2]
            # addresses are those of the panel, or of a pointer that the compiler keeps far ahead
            lines = (
                [displacement(line) for line in into_l1],
                [displacement(line) for line in into_l2],
            )
            assert [b - a for a, b in zip(*map(sorted, lines), strict=True)] == [far - near] * 2
            assert [abs(a - b) for a, b in lines] == [64, 64]
            assert name != "sapphirerapids" or min(lines[0]) == near
    assert passes >= 3


def rows_of(loop: list[str], dtype: DType, encoding: str) -> int:
    """The rows of a pass over panels: each has two vectors of columns."""
    products = sum("vdpbf16ps" in line or "vfmadd" in line for line in loop)
    return products // (4 if encoding.startswith("coded") else 2)


@pytest.mark.plain_code
@pytest.mark.parametrize(
    ("dtype", "encoding", "lines", "fewest"),
    [
        (DType.float32, "rows", 2, 8),
        (DType.bfloat16, "rows", 2, 8),
        (DType.bfloat16, "coded bfloat16", 3, 4),
    ],
)
def test_zen4_prefetches_where_lines_are_multiplied_for_long(
    dtype: DType, encoding: str, lines: int, fewest: int
) -> None:
    """Loops over a panel by their rows: each has one product a row, and none for padding."""
    found: dict[int, list[int]] = {}
    for loop in loops_of(dtype, encoding, "znver4"):
        near = sum("prefetcht0" in line for line in loop)
        far = sum("prefetcht1" in line for line in loop)
        # panels that are not coded have loops of their own
        decodes = encoding == "rows" or any("vpermb" in line for line in loop)
        if far == near and decodes:
            found.setdefault(rows_of(loop, dtype, encoding), []).append(near // lines)
    counts = {count for count, _ in gemv_passes(k.CPUTarget(FEATURES, "x86_64", "znver4"))}
    assert counts == {1, 2, 3, 4, 5, 6, 8} <= found.keys()
    for rows in counts:
        assert (max(found[rows]) > 0) == (rows >= fewest)


@pytest.mark.parametrize("registers", [16, 32])
def test_a_pass_has_at_most_one_row_that_is_not_there(registers: int) -> None:
    features = FEATURES if registers == 32 else frozenset({"avx2", "fma"})
    passes = gemv_passes(k.CPUTarget(features, "x86_64", "znver4"))
    most = passes[0][0]
    assert most == registers // 4 and passes[-1] == (1, 0)
    taken = [next(count for count, fewer in passes if rows > fewer) for rows in range(1, most + 1)]
    assert taken == sorted(taken)
    assert all(0 <= count - rows <= 1 for rows, count in enumerate(taken, 1))


@pytest.mark.plain_code
def test_other_processors_prefetch_nothing_into_the_l1_cache() -> None:
    dtype, encoding = DType.bfloat16, "rows"
    loops = loops_of(dtype, encoding, "icelake-server")
    assert not any("prefetcht0" in line for loop in loops for line in loop)
