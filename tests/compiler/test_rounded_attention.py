"""Casts in attention written as products and a softmax: the fused op rounds where the graph does."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from max._backends.cpu.backend import cpu_backends
from max._compiler.pipeline import optimize
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import clone_module, print_module
from tests.cpu_kernels.rounded_attention import (
    assert_attended,
    attended,
    picks,
    small_integers,
)

SESSION = InferenceSession(devices=[CPU()])
DEVICE = DeviceRef.CPU()
F32, BF16, F16 = DType.float32, DType.bfloat16, DType.float16
SCALE = 179 / 256
"""A bfloat16 scale whose products with bfloat16 values are not exact."""
ROWS, KEYS, SIZE, WIDTH = 5, 130, 16, 40
Build = Callable[[TensorValue, TensorValue, TensorValue, TensorValue], TensorValue]


def of_bfloat16(q: TensorValue, keys: TensorValue, v: TensorValue, m: TensorValue) -> TensorValue:
    """As in bfloat16 models: softmax in float32, all other ops in bfloat16."""
    scores = q @ keys.transpose(-1, -2) * SCALE + m
    return ops.softmax(scores.cast(F32)).cast(BF16) @ v


def masked_in_f32(q: TensorValue, keys: TensorValue, v: TensorValue, m: TensorValue) -> TensorValue:
    """Sums of a product that are cast to float32 are not rounded."""
    scores = (q @ keys.transpose(-1, -2)).cast(F32) * SCALE + m.cast(F32)
    return ops.softmax(scores).cast(BF16) @ v


def scaled_in_bf16(
    q: TensorValue, keys: TensorValue, v: TensorValue, m: TensorValue
) -> TensorValue:
    scores = (q @ keys.transpose(-1, -2) * SCALE).cast(F32) + m.cast(F32)
    return ops.softmax(scores) @ v.cast(F32)


def widened_softmax(
    q: TensorValue, keys: TensorValue, v: TensorValue, m: TensorValue
) -> TensorValue:
    """A bfloat16 softmax that is cast to float32 has bfloat16 values."""
    scores = q @ keys.transpose(-1, -2) * SCALE + m
    return ops.softmax(scores).cast(F32) @ v.cast(F32)


def narrowed(q: TensorValue, keys: TensorValue, v: TensorValue, m: TensorValue) -> TensorValue:
    """Casts of float32 results to narrower types and back."""
    scores = (q.cast(F32) @ keys.cast(F32).transpose(-1, -2) * SCALE).cast(BF16).cast(F32)
    scores = (scores + m.cast(F32)).cast(F16).cast(F32)
    return ops.softmax(scores).cast(BF16).cast(F32) @ v.cast(F32)


def uncast(q: TensorValue, keys: TensorValue, v: TensorValue, m: TensorValue) -> TensorValue:
    return ops.softmax(q @ keys.transpose(-1, -2) * SCALE + m) @ v


def two_roundings(q: TensorValue, keys: TensorValue, v: TensorValue, m: TensorValue) -> TensorValue:
    return ops.softmax(q @ keys.transpose(-1, -2) + m).cast(F16).cast(F32) @ v.cast(F32)


def scaled_after(q: TensorValue, keys: TensorValue, v: TensorValue, m: TensorValue) -> TensorValue:
    scores = (q.cast(F32) @ keys.cast(F32).transpose(-1, -2)).cast(BF16).cast(F32) * SCALE
    return ops.softmax(scores + m.cast(F32)) @ v.cast(F32)


def staged(build: Build, shapes: list[tuple[int, ...]]) -> tuple[Graph, list[str] | None]:
    """The graph, and the roundings of its fused op; None: nothing was fused."""
    types = [TensorType(BF16, shape, DEVICE) for shape in shapes]
    with Graph("attention", input_types=types) as graph:
        graph.output(build(*[v.tensor for v in graph.inputs]))
    module = clone_module(graph.to_mlir())
    optimize(module, cpu_backends())
    match = re.search(r"mok\.attention\(.*roundings = \[(.*?)\]", print_module(module))
    return graph, None if match is None else re.findall(r"unit|bf16|f16", match[1])


@pytest.mark.parametrize(
    ("build", "roundings"),
    [
        (of_bfloat16, ["unit", "bf16", "bf16"]),
        (masked_in_f32, ["unit", "unit", "bf16"]),
        (scaled_in_bf16, ["bf16", "unit", "unit"]),
        (widened_softmax, ["unit", "unit", "bf16"]),
        (narrowed, ["bf16", "f16", "bf16"]),
        (uncast, ["unit", "unit", "unit"]),
        (two_roundings, None),
        (scaled_after, None),
    ],
)
def test_casts(build: Build, roundings: list[str] | None, rng: np.random.Generator) -> None:
    bf16 = np.dtype(ml_dtypes.bfloat16)
    operands = [
        small_integers(rng, bf16, 2, 3, ROWS, SIZE),
        small_integers(rng, bf16, 2, 3, KEYS, SIZE),
        np.stack([[picks(rng, bf16, KEYS, WIDTH) for _ in range(3)] for _ in range(2)]),
        rng.standard_normal((2, 1, ROWS, KEYS)).astype(bf16),
    ]
    graph, got_roundings = staged(build, [x.shape for x in operands])
    assert got_roundings == roundings
    (got,) = SESSION.load(graph).execute(*operands)
    if roundings is None:
        return
    dtypes = {"unit": None, "bf16": bf16, "f16": np.float16}
    want, slack = attended(operands, SCALE, (None,), [dtypes[name] for name in roundings])
    assert_attended(got.to_numpy(), want, slack)


def test_the_reference_distinguishes_roundings(rng: np.random.Generator) -> None:
    """Results with another rounding are out of tolerance."""
    bf16 = np.dtype(ml_dtypes.bfloat16)
    operands = [
        small_integers(rng, bf16, ROWS, SIZE),
        small_integers(rng, bf16, KEYS, SIZE),
        picks(rng, bf16, KEYS, WIDTH),
        rng.standard_normal((ROWS, KEYS)).astype(bf16),
    ]
    all_three = [bf16, bf16, bf16]
    want, slack = attended(operands, SCALE, (None,), all_three)
    for place in range(3):
        roundings = [None if i == place else dtype for i, dtype in enumerate(all_three)]
        other, _ = attended(operands, SCALE, (None,), roundings)
        with pytest.raises(AssertionError):
            assert_attended(other.astype(np.float32), want, slack)
