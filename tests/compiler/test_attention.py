"""Attention from products and a softmax: the graphs that become one op, and their results against NumPy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.backend import cpu_backends
from max._compiler.pipeline import compile_module, optimize
from max._config import flags
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import clone_module, print_module
from max.nn import MultiheadAttention
from tests.tolerance import assert_close

SESSION = InferenceSession(devices=[CPU()])
DEVICE = DeviceRef.CPU()
DTYPES = {
    DType.float32: np.dtype(np.float32),
    DType.bfloat16: np.dtype(ml_dtypes.bfloat16),
    DType.float16: np.dtype(np.float16),
}
F32, BF16, F16 = DType.float32, DType.bfloat16, DType.float16
Build = Callable[..., TensorValue]
Array = np.ndarray[Any, Any]


def staged(build: Build, arrays: Sequence[Array], dims: Sequence[Sequence[Any]] = ()) -> Graph:
    shapes = [*dims, *(x.shape for x in arrays[len(dims) :])]
    types = [
        TensorType(DType.from_numpy(x.dtype), shape, DEVICE)
        for x, shape in zip(arrays, shapes, strict=True)
    ]
    with Graph("attention", input_types=types) as graph:
        graph.output(build(*[v.tensor for v in graph.inputs]))
    return graph


def fused(graph: Graph) -> int:
    """The number of attention ops in a graph after the pass."""
    module = clone_module(graph.to_mlir())
    optimize(module, cpu_backends())
    return print_module(module).count("mok.attention(")


def launches(graph: Graph) -> list[str]:
    compiled, _ = compile_module(graph.to_mlir(), [], cpu_backends(k.host_target()))
    return [launch.name for launch in compiled.main.launches]


def executed(graph: Graph, arrays: Sequence[Array]) -> Array:
    model = SESSION.load(graph)
    (result,) = model.execute(*[Tensor.from_numpy(x) for x in arrays])
    return result.to_numpy()


def softmax(scores: Array) -> Array:
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)


def reference(q: Array, keys: Array, values: Array, scale: float, *masks: Array) -> Array:
    """Attention over `[…, heads, rows, size]`; the number of query heads is a multiple of the number of KV heads."""
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    if keys.shape[-3] != q.shape[-3]:
        times = q.shape[-3] // keys.shape[-3]
        keys, values = (np.repeat(x, times, -3) for x in (keys, values))
    scores = q @ np.swapaxes(keys, -1, -2) * scale
    for mask in masks:
        if mask.dtype == bool:
            scores = np.where(mask, scores, -1e4)
        else:
            scores = scores + mask.astype(np.float64)
    return softmax(scores) @ values


def floats(rng: np.random.Generator, dtype: DType, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def attend(
    q: TensorValue, keys: TensorValue, values: TensorValue, *masks: TensorValue
) -> TensorValue:
    scores = q @ ops.transpose(keys, -1, -2) * (1 / math.sqrt(int(q.shape[-1])))
    for mask in masks:
        if mask.dtype is DType.bool:
            scores = ops.where(mask, scores, -1e4)
        else:
            scores = scores + mask
    return ops.softmax(scores) @ values


@dataclass(frozen=True)
class Case:
    """A way to write attention, and the shapes of its operands."""

    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    size: int
    width: int
    dtype: DType
    tokens_first: bool
    """Whether heads are an axis after the tokens in memory."""
    in_f32: bool
    """Whether the softmax is computed in float32."""
    scaled: str
    """The value that is scaled."""
    masks: tuple[str, ...]
    symbolic: bool


def build(case: Case) -> Build:
    """A graph for the case."""
    scale = case.size**-0.5

    def heads_first(x: TensorValue) -> TensorValue:
        return ops.permute(x, [0, 2, 1, 3]) if case.tokens_first else x

    def repeated(x: TensorValue) -> TensorValue:
        if case.group == 1:
            return x
        batch, heads, rows, size = x.shape
        apart = ops.reshape(x, [batch, heads, 1, rows, size])
        spread = ops.broadcast_to(apart, [batch, heads, case.group, rows, size])
        return ops.reshape(spread, [batch, heads * case.group, rows, size])

    def made(
        q: TensorValue, keys: TensorValue, values: TensorValue, *masks: TensorValue
    ) -> TensorValue:
        q, keys, values = (heads_first(x) for x in (q, keys, values))
        keys, values = repeated(keys), repeated(values)
        if case.scaled == "q":
            q = q * scale
        turned = ops.permute(keys, [0, 1, 3, 2])
        if case.scaled == "keys":
            turned = turned * scale
        scores = q @ turned
        if case.in_f32:
            scores = ops.cast(scores, F32)
        if case.scaled == "scores":
            scores = scores * scale
        if case.scaled == "divided":
            scores = scores / math.sqrt(case.size)
        for mask in masks:
            if mask.dtype is DType.bool:
                scores = ops.where(mask, scores, -1e4)
            else:
                scores = scores + ops.cast(mask, scores.dtype)
        probabilities = ops.cast(ops.softmax(scores), values.dtype)
        out = probabilities @ values
        if not case.tokens_first:
            return out
        batch, _, rows, _ = out.shape
        return ops.reshape(
            ops.permute(out, [0, 2, 1, 3]), [batch, rows, case.heads * case.group * case.width]
        )

    return made


CASES = st.builds(
    Case,
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 1, 2, 4]),
    queries=st.sampled_from([1, 2, 7, 16, 33, 130]),
    keys=st.sampled_from([1, 5, 16, 31, 130, 600]),
    size=st.sampled_from([1, 8, 24, 33, 64]),
    width=st.sampled_from([8, 33, 64]),
    dtype=st.sampled_from(list(DTYPES)),
    tokens_first=st.booleans(),
    in_f32=st.booleans(),
    scaled=st.sampled_from(["q", "keys", "scores", "divided"]),
    masks=st.lists(st.sampled_from(["row", "full", "bool", "rank2"]), max_size=2).map(tuple),
    symbolic=st.booleans(),
)


def mask_of(kind: str, case: Case, rng: np.random.Generator) -> Array:
    heads, rows, keys = case.heads * case.group, case.queries, case.keys
    if kind == "row":
        return floats(rng, case.dtype, case.batch, 1, 1, keys)
    if kind == "full":
        return floats(rng, case.dtype, case.batch, heads, rows, keys)
    if kind == "rank2":
        return floats(rng, case.dtype, rows, keys)
    return rng.random((case.batch, 1, rows, keys)) > 0.3


@settings(max_examples=8, deadline=None)
@given(case=CASES, seed=st.integers(0, 99))
def test_graphs(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [
        floats(rng, case.dtype, case.batch, heads, rows, size)
        for heads, rows, size in (
            (case.heads * case.group, case.queries, case.size),
            (case.heads, case.keys, case.size),
            (case.heads, case.keys, case.width),
        )
    ]
    masks = [mask_of(kind, case, rng) for kind in case.masks]
    want = reference(*parts, case.size**-0.5, *masks)
    dims: list[list[Any]] = []
    if case.tokens_first:
        parts = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in parts]
        want = want.transpose(0, 2, 1, 3).reshape(case.batch, case.queries, -1)
    if case.symbolic and not masks:
        at = 1 if case.tokens_first else 2
        for x, name in zip(parts, ("rows", "keys", "keys"), strict=True):
            shape: list[Any] = list(x.shape)
            shape[0], shape[at] = "batch", name
            dims.append(shape)
    graph = staged(build(case), [*parts, *masks], dims)
    assert fused(graph) == 1
    got = executed(graph, [*parts, *masks])
    assert_close(got, want, dtype=DTYPES[case.dtype], scale=2)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(case=CASES, seed=st.integers(0, 99))
def test_graphs_long(case: Case, seed: int) -> None:
    test_graphs.hypothesis.inner_test(case, seed)  # type: ignore[attr-defined]


@pytest.mark.parametrize("check", [2, 3])
def test_the_module_is_valid_after_each_pass(check: int) -> None:
    rng = np.random.default_rng(0)
    q, keys = floats(rng, F32, 2, 3, 7, 8), floats(rng, F32, 2, 3, 9, 8)
    masks = [floats(rng, F32, 9), rng.random((2, 1, 7, 9)) > 0.5]
    with flags.override(MAX_CHECK=check):
        assert fused(staged(attend, [q, keys, keys, *masks])) == 1


def test_tokens_first_needs_no_copies() -> None:
    def build(x: TensorValue) -> TensorValue:
        parts = [
            ops.permute(ops.reshape(p, [2, 20, 4, 8]), [0, 2, 1, 3])
            for p in ops.chunk(x, 3, axis=2)
        ]
        return ops.reshape(ops.permute(attend(*parts), [0, 2, 1, 3]), [2, 20, 32])

    assert launches(staged(build, [np.zeros((2, 20, 96), np.float32)])) == ["attention"]


def test_grouped_heads_need_no_copies() -> None:
    def build(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
        q = ops.permute(q, [0, 2, 1, 3])
        spread = [
            ops.permute(
                ops.reshape(
                    ops.broadcast_to(ops.reshape(x, [2, 20, 2, 1, 8]), [2, 20, 2, 3, 8]),
                    [2, 20, 6, 8],
                ),
                [0, 2, 1, 3],
            )
            for x in (keys, values)
        ]
        return ops.reshape(ops.permute(attend(q, *spread), [0, 2, 1, 3]), [2, 20, 48])

    rng = np.random.default_rng(0)
    arrays = [floats(rng, F32, 2, 20, heads, 8) for heads in (6, 2, 2)]
    graph = staged(build, arrays)
    assert launches(graph) == ["attention"]
    want = reference(*(x.transpose(0, 2, 1, 3) for x in arrays), 8**-0.5)
    assert_close(executed(graph, arrays), want.transpose(0, 2, 1, 3).reshape(2, 20, 48))


def test_the_module_of_max_nn() -> None:
    layer = MultiheadAttention(4, 32, [DEVICE], F32, stacked_qkv=True, qkv_has_bias=True)
    assert fused(staged(layer, [np.zeros((2, 20, 32), np.float32)])) == 1


def test_matrices() -> None:
    rng = np.random.default_rng(0)
    arrays = [floats(rng, F32, rows, 16) for rows in (20, 33, 33)]
    graph = staged(lambda q, keys, values: attend(q, keys, values), arrays)
    assert fused(graph) == 1
    want = reference(*(x[None] for x in arrays), 0.25)[0]
    assert_close(executed(graph, arrays), want)


def test_one_head_of_keys_for_all() -> None:
    """Keys and values are matrices, or have an axis of 1."""
    rng = np.random.default_rng(0)
    q, keys = floats(rng, F32, 2, 6, 5, 16), floats(rng, F32, 40, 16)
    graph = staged(attend, [q, keys, keys])
    assert fused(graph) == 1
    want = reference(q, *[np.broadcast_to(keys, (2, 6, 40, 16))] * 2, 0.25)
    assert_close(executed(graph, [q, keys, keys]), want)
    keys = floats(rng, F32, 2, 1, 40, 16)
    graph = staged(attend, [q, keys, keys])
    assert launches(graph) == ["attention"]
    want = reference(q, *[np.broadcast_to(keys, (2, 6, 40, 16))] * 2, 0.25)
    assert_close(executed(graph, [q, keys, keys]), want)


def test_heads_and_batch_are_one_axis() -> None:
    """Products over three axes, with a mask over four."""

    def build(q: TensorValue, keys: TensorValue, mask: TensorValue) -> TensorValue:
        flat = [ops.reshape(ops.permute(x, [0, 2, 1, 3]), [6, x.shape[1], 8]) for x in (q, keys)]
        scores = flat[0] @ ops.transpose(flat[1], 1, 2)
        scores = ops.reshape(scores, [2, 3, 20, 20]) + mask
        p = ops.reshape(ops.softmax(scores), [6, 20, 20])
        return ops.permute(ops.reshape(p @ flat[1], [2, 3, 20, 8]), [0, 2, 1, 3])

    rng = np.random.default_rng(0)
    q, keys = floats(rng, F32, 2, 20, 3, 8), floats(rng, F32, 2, 20, 3, 8)
    mask = floats(rng, F32, 2, 1, 1, 20)
    graph = staged(build, [q, keys, mask])
    assert launches(graph) == ["attention"]
    parts = [x.transpose(0, 2, 1, 3) for x in (q, keys, keys)]
    want = reference(*parts, 1.0, mask).transpose(0, 2, 1, 3)
    assert_close(executed(graph, [q, keys, mask]), want)


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("keys", [16, 700])
def test_rows_that_see_nothing(rows: int, keys: int) -> None:
    """A row of -inf gives NaN, as in a softmax; finite masks are ordinary numbers."""
    rng = np.random.default_rng(0)
    q, k_, v = (floats(rng, F32, 1, n, 8) for n in (rows, keys, keys))
    for fill in (-np.inf, np.finfo(np.float32).min):
        mask = np.zeros((rows, keys), np.float32)
        mask[0], mask[-1, : keys // 2] = fill, -np.inf
        want = reference(q, k_, v, 8**-0.5, mask)
        if np.isfinite(fill) and rows > 1:
            # the digits lost beside such a large number are lost for all keys
            want[0, 0] = v[0].astype(np.float64).mean(0)
        if rows == 1:
            mask[0] = fill
            want = reference(q, k_, v, 8**-0.5, mask)
            want = v.astype(np.float64).mean(1, keepdims=True) if np.isfinite(fill) else want
        got = executed(staged(attend, [q, k_, v, mask]), [q, k_, v, mask])
        assert_close(got, want)


@pytest.mark.parametrize("rows", [2, 40])
def test_what_is_not_a_number(rows: int) -> None:
    rng = np.random.default_rng(0)
    q, keys, values = (floats(rng, F32, 1, n, 8) for n in (rows, 600, 600))
    q[0, 1, 3] = np.nan
    want = reference(q, keys, values, 8**-0.5)
    assert_close(executed(staged(attend, [q, keys, values]), [q, keys, values]), want)
    mask = np.zeros((rows, 600), np.float32)
    mask[:, :512] = -np.inf
    want = reference(q, keys, values, 8**-0.5, mask)
    got = executed(staged(attend, [q, keys, values, mask]), [q, keys, values, mask])
    assert_close(got, want)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-3, 40.0])
@pytest.mark.parametrize("rows", [3, 30])
def test_scales(scale: float, rows: int) -> None:
    def build(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
        return ops.softmax(q @ ops.transpose(keys, 1, 2) * scale) @ values

    rng = np.random.default_rng(0)
    arrays = [floats(rng, F32, 2, n, 8) for n in (rows, 50, 50)]
    graph = staged(build, arrays)
    assert fused(graph) == 1
    assert_close(executed(graph, arrays), reference(*arrays, scale), scale=1 + abs(scale))


def twice(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    scores = q @ ops.transpose(keys, 1, 2)
    return ops.softmax(scores) @ values + ops.max(scores, axis=-1)


def probabilities_too(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    p = ops.softmax(q @ ops.transpose(keys, 1, 2))
    return p @ values + ops.max(p, axis=-1)


def other_axis(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    return ops.softmax(q @ ops.transpose(keys, 1, 2), axis=1) @ values


def scaled_after_the_mask(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    return ops.softmax((q @ ops.transpose(keys, 1, 2) + 1.5 * ops.sum(q, -1)) * 0.5) @ values


def varying_scale(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    return ops.softmax(q @ ops.transpose(keys, 1, 2) * ops.sum(q, -1)) @ values


def bent(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    return ops.softmax(ops.tanh(q @ ops.transpose(keys, 1, 2))) @ values


def right_operand(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    p = ops.softmax(keys @ ops.transpose(q, 1, 2))
    return ops.transpose(values, 1, 2) @ p


def regrouped(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    """A reshape that mixes queries and keys."""
    p = ops.softmax(q @ ops.transpose(keys, 1, 2))
    return ops.reshape(p, [2, 40, 20]) @ q


def with_weights(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
    w = ops.constant(np.ones((8, 40), np.float32), F32, DEVICE)
    return ops.softmax(q @ w) @ values


@pytest.mark.parametrize(
    "build",
    [
        twice,
        probabilities_too,
        other_axis,
        scaled_after_the_mask,
        varying_scale,
        bent,
        right_operand,
        regrouped,
        with_weights,
    ],
)
def test_what_stays_as_it_is(build: Build) -> None:
    rng = np.random.default_rng(0)
    arrays = [floats(rng, F32, 2, n, 8) for n in (20, 40, 40)]
    graph = staged(build, arrays)
    assert not fused(graph)
    executed(graph, arrays)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("rows", [5, 100])
def test_no_less_precise_than_the_products(dtype: DType, rows: int) -> None:
    """Against the same ops unfused, since the probabilities have a second use."""

    def apart(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
        p = ops.softmax(q @ ops.transpose(keys, 1, 2) * 0.125)
        out = p @ values
        return ops.concat([out, p], -1)

    rng = np.random.default_rng(0)
    arrays = [floats(rng, dtype, 8, n, 64) for n in (rows, 500, 500)]
    want = reference(*arrays, 0.125)
    one, other = staged(attend, arrays), staged(apart, arrays)
    assert fused(one) == 1 and not fused(other)
    errors = [
        np.sqrt(np.mean((executed(g, arrays)[..., :64].astype(np.float64) - want) ** 2))
        for g in (one, other)
    ]
    # products of few rows add up slices of the keys, which rounds less than one chain
    assert errors[0] <= 1.1 * errors[1]


def guarded(
    q: TensorValue, keys: TensorValue, values: TensorValue, mask: TensorValue
) -> TensorValue:
    """Attention as torch exports it for boolean masks: probabilities that are NaN are 0."""
    weights = ops.softmax(q @ ops.transpose(keys, -1, -2) * 0.25 + mask)
    zero = ops.constant(0.0, F32, DEVICE)
    return ops.where(ops.is_nan(weights), zero, weights) @ values


def masked_rows(
    q: TensorValue, keys: TensorValue, values: TensorValue, mask: TensorValue
) -> TensorValue:
    """Attention as torch decomposes it: probabilities of rows whose greatest score is -inf are 0."""
    scores = q @ ops.transpose(keys, -1, -2) * 0.25 + mask
    zero = ops.constant(0.0, F32, DEVICE)
    is_masked = ops.equal(ops.max(scores, axis=-1), -np.inf)
    return ops.where(is_masked, zero, ops.softmax(scores)) @ values


@pytest.mark.parametrize("build", [guarded, masked_rows])
@pytest.mark.parametrize(
    ("batch", "rows", "length"), [(3, 5, 7), (2, 300, 130), (1, 1, 700), (2, 3, 2000)]
)
def test_guarded_probabilities(build: Any, batch: int, rows: int, length: int) -> None:
    """Rows whose keys are all masked are 0, one with a NaN among its scores is 0 or NaN; also of split tasks."""
    rng = np.random.default_rng(rows)
    arrays = [floats(rng, F32, batch, *sizes) for sizes in ((rows, 16), (length, 16), (length, 8))]
    q, keys, values = arrays
    mask = np.where(rng.random((rows, length)) < 0.5, -np.inf, 0).astype(np.float32)
    mask[rows // 2] = -np.inf
    q[-1, 0, 3] = np.nan
    graph = staged(build, [*arrays, mask])
    assert launches(graph) == ["attention"]
    with np.errstate(invalid="ignore"):
        scores = q.astype(np.float64) @ np.swapaxes(keys, -1, -2) * 0.25 + mask
        weights = softmax(scores)
    all_masked = np.all(scores == -np.inf, -1, keepdims=True)
    expected = np.where(np.isnan(weights) if build is guarded else all_masked, 0, weights) @ values
    if rows > 1:
        assert not expected[:, rows // 2].any()
        assert not expected[-1, 0].any() if build is guarded else np.isnan(expected[-1, 0]).all()
    assert_close(executed(graph, [*arrays, mask]), expected)


@pytest.mark.parametrize("change", ["fill", "other", "least", "number", "axis", "used", "read"])
def test_other_tests_of_scores(change: str) -> None:
    """A select of another number, by other scores or their least ones, another number or axis, or read elsewhere."""

    def build(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
        scores = q @ ops.transpose(keys, -1, -2)
        weights = ops.softmax(scores)
        tested = q if change == "other" else scores
        greatest = (ops.min if change == "least" else ops.max)(
            tested, axis=-2 if change == "axis" else -1
        )
        is_masked = ops.equal(greatest, 7.0 if change == "number" else -np.inf)
        fill = ops.constant(0.5 if change == "fill" else 0.0, F32, DEVICE)
        result = ops.where(is_masked, fill, weights) @ values
        if change == "read":
            return result + ops.max(weights)
        return result + ops.max(greatest) if change == "used" else result

    rng = np.random.default_rng(1)
    arrays = [floats(rng, F32, 2, *sizes) for sizes in ((6, 8), (6, 8), (6, 6))]
    graph = staged(build, arrays)
    assert not fused(graph)
    scores = arrays[0].astype(np.float64) @ np.swapaxes(arrays[1], -1, -2)
    weights = softmax(scores)
    more = {"used": scores.max(-1, keepdims=True), "read": weights.max(-1, keepdims=True)}.get(
        change, 0
    )
    assert_close(executed(graph, arrays), weights @ arrays[2] + more)


@pytest.mark.parametrize("change", ["fill", "other", "used"])
def test_other_selects_of_probabilities(change: str) -> None:
    """A select of another number, of another value's NaNs, or of probabilities that are read elsewhere stays."""

    def build(q: TensorValue, keys: TensorValue, values: TensorValue) -> TensorValue:
        scores = q @ ops.transpose(keys, -1, -2)
        weights = ops.softmax(scores)
        tested = ops.is_nan(scores if change == "other" else weights)
        fill = ops.constant(0.5 if change == "fill" else 0.0, F32, DEVICE)
        result = ops.where(tested, fill, weights) @ values
        return result + ops.max(weights) if change == "used" else result

    rng = np.random.default_rng(1)
    arrays = [floats(rng, F32, 2, *sizes) for sizes in ((4, 8), (6, 8), (6, 8))]
    graph = staged(build, arrays)
    assert not fused(graph)
    weights = softmax(arrays[0].astype(np.float64) @ np.swapaxes(arrays[1], -1, -2))
    more = weights.max(-1, keepdims=True) if change == "used" else 0
    assert_close(executed(graph, arrays), weights @ arrays[2] + more)
