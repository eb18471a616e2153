"""Coded weights in graphs: which products read them, and results equal to those of plain weights."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from xdsl.ir import SSAValue

from max import kernel as k
from max._backends.cpu import backend as cpu_backend
from max._backends.cpu.packing import CPU_PACKING, Packing, packing_of
from max._backends.cpu.passes.code_weights import code_weights
from max._backends.cpu.passes.packed_ops import CodeOp, PackedMatmulOp
from max._compiler import mok
from max._compiler.pipeline import optimize
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import MoOp, clone_module, entry
from tests.compiler.test_grouped_products import GROUPS, groups_of, product
from tests.cpu_kernels.harness import target

DEVICE = DeviceRef.CPU()
ENCODINGS = {"coded": "coded bfloat16", "f32": "coded float32", "halved": "halved float32"}


def matrix(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> TensorValue:
    """Weights whose lower halves are zero."""
    w = rng.standard_normal(shape).astype(np.float32)
    w.view(np.uint32)[...] &= 0xFFFF0000
    array = w if dtype is DType.float32 else w.astype(ml_dtypes.bfloat16)
    return ops.constant(array, dtype, DEVICE)


def gated(dtype: DType, inner: int = 64) -> Graph:
    """A gated product, whose weights share panels, a single one, and one of a weight that is used twice."""
    rng = np.random.default_rng(inner)
    with Graph("gated", input_types=[TensorType(dtype, ["n", inner], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        a, b = (x @ matrix(rng, (inner, 96), dtype) for _ in range(2))
        h = ops.silu(a) * b
        w = matrix(rng, (32, 96), dtype)
        y = h @ ops.transpose(w, 0, 1)
        graph.output(y, ops.tanh(h) @ ops.transpose(w, 0, 1))
    return graph


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The encodings of weights that are coded from now on: a program that another test compiled codes none."""
    chosen: list[str] = []
    plain = CodeOp.of

    def of(packed: SSAValue, encoding: str) -> CodeOp:
        chosen.append(encoding)
        return plain(packed, encoding)

    monkeypatch.setattr(CodeOp, "of", of)
    return chosen


def products(graph: Graph, backends: object) -> list[tuple[str, str]]:
    module = clone_module(graph._module)  # pyright: ignore[reportPrivateUsage]
    optimize(module, backends, last="code-weights")  # pyright: ignore[reportArgumentType]
    return [
        (op.name, op.attr("encoding"))
        for op in module.walk()
        if isinstance(op, MoOp)
        and op.name in ("mok.packed_matmul", "mok.packed_products", "mok.code")
    ]


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32])
def test_streamed_products_read_coded_weights(dtype: DType) -> None:
    encoding = f"coded {dtype.name}"
    backends = cpu_backend.cpu_backends()
    host = backends.host
    packing = replace(CPU_PACKING, streamed_bytes=1, codings={dtype: encoding})
    host.packing = packing  # pyright: ignore[reportAttributeAccessIssue]
    found = products(gated(dtype), backends)
    assert [name for name, _ in found].count("mok.code") == 2
    assert {encoding for _, encoding in found} == {encoding}
    # K must be whole steps
    assert all("coded" not in encoding for _, encoding in products(gated(dtype, 48), backends)[:1])
    host.packing = replace(packing, streamed_bytes=1 << 30)  # pyright: ignore[reportAttributeAccessIssue]
    assert all("coded" not in encoding for _, encoding in products(gated(dtype), backends))


@pytest.mark.parametrize(
    ("runs_here", "streamed", "encoding"),
    [(True, True, "coded bfloat16"), (False, True, "rows"), (True, False, "rows")],
)
def test_the_dtype_of_the_weight_counts(runs_here: bool, streamed: bool, encoding: str) -> None:
    """The x of a product may be wider than its weight; no other pass runs."""
    x, w = "!mo.tensor<[n, 64], f32, cpu:0>", "!mo.tensor<[1, 2048], bf16, cpu:0>"
    attributes = f'encoding = "rows", columns = 32 : i64, streamed = {str(streamed).lower()}'
    module = mok.parse(
        f"""builtin.module {{ mo.graph @g(%x: {x}) -> (!mo.tensor<[n, 32], f32, cpu:0>) {{
            %w = mo.constant.external() {{name = "w"}} : () -> {w}
            %p = mok.pack(%w) {{encoding = "rows"}} : ({w}) -> {w}
            %y = mok.packed_matmul(%x, %p) {{{attributes}}} : ({x}, {w}) -> !mo.tensor<[n, 32], f32, cpu:0>
            mo.output(%y) : (!mo.tensor<[n, 32], f32, cpu:0>) -> () }} }}"""
    )
    codings = {DType.bfloat16: "coded bfloat16"}
    packing = replace(CPU_PACKING, streamed_bytes=1, codings=codings)
    code_weights(entry(module).block, lambda op: runs_here, packing)
    (product,) = [op for op in module.walk() if isinstance(op, PackedMatmulOp)]
    assert product.attr("encoding") == encoding
    assert len([op for op in module.walk() if isinstance(op, CodeOp)]) == (encoding != "rows")


@pytest.mark.parametrize(("limit", "count"), [(8192, 2), (8193, 0)])
def test_few_weights_are_not_coded(limit: int, count: int) -> None:
    """A weight of several products counts once, one that is not streamed never."""
    x, w = "!mo.tensor<[n, 64], bf16, cpu:0>", "!mo.tensor<[1, 2048], bf16, cpu:0>"
    y = "!mo.tensor<[n, 32], bf16, cpu:0>"
    uses = (("a", "p", "true"), ("b", "p", "true"), ("c", "q", "true"), ("d", "r", "false"))
    module = mok.parse(
        f"builtin.module {{ mo.graph @g(%x: {x}) -> ({', '.join([y] * 4)}) {{"
        + "".join(
            f'%{name}w = mo.constant.external() {{name = "{name}"}} : () -> {w}\n'
            f'%{name} = mok.pack(%{name}w) {{encoding = "rows"}} : ({w}) -> {w}\n'
            for name in "pqr"
        )
        + "".join(
            f'%{name} = mok.packed_matmul(%x, %{packed}) {{encoding = "rows", columns = 32 : i64, '
            f"streamed = {streamed}}} : ({x}, {w}) -> {y}\n"
            for name, packed, streamed in uses
        )
        + f"mo.output(%a, %b, %c, %d) : ({', '.join([y] * 4)}) -> () }} }}"
    )
    codings = {DType.bfloat16: "coded bfloat16"}
    packing = replace(CPU_PACKING, streamed_bytes=limit, codings=codings)
    code_weights(entry(module).block, lambda op: True, packing)
    assert len([op for op in module.walk() if isinstance(op, CodeOp)]) == count


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("encoding", ENCODINGS.values())
def test_equal_results(encoding: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = DType.bfloat16 if encoding.endswith("bfloat16") else DType.float32
    x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(dtype.to_numpy())
    coded_weights = counted(monkeypatch)
    results: list[list[np.ndarray]] = []
    for coded in ({}, {dtype: encoding}):
        packing = replace(CPU_PACKING, streamed_bytes=1, codings=coded)

        def chosen(_: k.Target, packing: Packing = packing) -> Packing:
            return packing

        monkeypatch.setattr(cpu_backend, "packing_of", chosen)
        model = InferenceSession(devices=[CPU()]).load(gated(dtype))
        results.append([r.view(DType.uint8).to_numpy().copy() for r in model.execute(x)])
    assert coded_weights == [encoding] * 2
    for plain, packed in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, packed)


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32])
@pytest.mark.parametrize("streamed_bytes", [1, 1 << 40])
def test_many_rows_read_plain_weights(dtype, streamed_bytes, monkeypatch, rng) -> None:
    """Of 0, 32 and 64 rows; a weight that a product of few rows reads too is kept once."""
    packing = replace(
        CPU_PACKING, streamed_bytes=streamed_bytes, codings={dtype: f"coded {dtype.name}"}
    )
    monkeypatch.setattr(cpu_backend, "packing_of", lambda _: packing)
    coded_weights = counted(monkeypatch)
    w = rng.standard_normal((64, 70)).astype(dtype.to_numpy())
    types = [TensorType(dtype, shape, DEVICE) for shape in (("n", 32, 64), ("m", 64))]
    with Graph("many", input_types=types) as graph:
        many, few = (value.tensor for value in graph.inputs)
        weight = ops.constant(w, dtype, DEVICE)
        graph.output(ops.relu(many @ weight), few @ weight)
    model = InferenceSession(devices=[CPU()]).load(graph)
    assert coded_weights == []
    for n in (0, 1, 2):
        x, y = (rng.standard_normal(s).astype(dtype.to_numpy()) for s in ((n, 32, 64), (3, 64)))
        for result, operand in zip(model.execute(x, y), (x, y), strict=True):
            found = result.view(DType.uint8).to_numpy().view(dtype.to_numpy()).astype(np.float32)
            expected = operand.astype(np.float32) @ w.astype(np.float32)
            if operand is x:
                expected = np.maximum(expected, 0)
            np.testing.assert_allclose(found, expected, rtol=2e-2, atol=0.15)


@pytest.mark.parametrize("encoding", ENCODINGS.values())
def test_experts_read_coded_weights(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of few rows, which decode in registers, of many, and an expert without rows."""
    dtype = DType.bfloat16 if encoding.endswith("bfloat16") else DType.float32
    counts = [4, 0, 30, 2, 1]
    coded_weights = counted(monkeypatch)
    rng = np.random.default_rng(3)
    w = rng.standard_normal((5, 64, 64)).astype(np.float32)
    w.view(np.uint32)[...] &= 0xFFFF0000
    x = rng.standard_normal((sum(counts), 64)).astype(dtype.to_numpy())
    types = [TensorType(dtype, ("m", 64), DEVICE), *GROUPS]
    with Graph("experts", input_types=types) as graph:
        rows, *groups = (value.tensor for value in graph.inputs)
        weight = ops.constant(w.astype(dtype.to_numpy()), dtype, DEVICE)
        graph.output(product(rows, weight, tuple(groups)))
    results: list[np.ndarray] = []
    for coded in ({}, {dtype: encoding}):
        packing = replace(CPU_PACKING, streamed_bytes=1, codings=coded)

        def chosen(_: k.Target, packing: Packing = packing) -> Packing:
            return packing

        monkeypatch.setattr(cpu_backend, "packing_of", chosen)
        model = InferenceSession(devices=[CPU()]).load(graph)
        (y,) = model.execute(x, *groups_of(counts))
        results.append(y.view(DType.uint8).to_numpy().copy())
    assert coded_weights == [encoding]
    np.testing.assert_array_equal(results[0], results[1])


def test_targets() -> None:
    assert packing_of(target("generic")).codings == {DType.float32: "halved float32"}
    assert packing_of(target("avx2")).codings == {DType.float32: "halved float32"}
    names = frozenset({"avx512bw", "avx512bf16", "avx512vbmi"})
    fast = k.CPUTarget(names, "x86_64-unknown-linux-gnu", "znver4")
    assert packing_of(fast).codings == {
        DType.float32: "coded float32",
        DType.bfloat16: "coded bfloat16",
    }
    arm = k.CPUTarget(frozenset({"bf16"}), "aarch64-unknown-linux-gnu", "generic")
    assert packing_of(arm).codings == {
        DType.float32: "halved float32",
        DType.bfloat16: "coded bfloat16",
    }
