"""Convolutions and scans with states, against loops over tokens in float64, and against each other."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max._interpreter import REFERENCES
from tests.cpu_kernels.harness import Runner

Array = np.ndarray
F32, BF16 = np.float32, ml_dtypes.bfloat16
LAYERS, LAYER = 3, np.array(1, np.uint32)
OPS = ("conv", "ssd", "ssd_grouped", "scan")
LIMITS = {"low": 0.01, "high": 1.5}


def batch(rng: np.random.Generator, lengths: list[int], slots: int = 9) -> list[Array]:
    """Offsets, cached lengths with some 0, and shuffled slots."""
    offsets = np.cumsum([0, *lengths]).astype(np.uint32)
    cached = rng.integers(0, 2, len(lengths)) * rng.integers(1, 50, len(lengths))
    return [
        offsets,
        cached.astype(np.uint32),
        rng.permutation(slots)[: len(lengths)].astype(np.uint32),
    ]


class Problem:
    """Random operands of an op. Slots outside of the batch and slots without cached tokens hold NaN."""

    def __init__(self, op: str, lengths: list[int], size: int, states: int, dtype: Any, seed: int):
        rng = np.random.default_rng(seed)
        total = sum(lengths)

        def floats(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(dtype)

        where = batch(rng, lengths)
        self.attributes: dict[str, Any] = dict(LIMITS)
        if op == "conv":
            taps = states
            self.name, shape = "mo.causal_conv.ragged", (taps - 1, size)
            self.attributes = {"activation": "silu"}
            inputs = [floats(total, size), floats(taps, size), floats(size)]
        elif op == "scan":
            self.name, shape = "mo.selective_scan.ragged", (states, size)
            rates = -np.exp(rng.standard_normal((states, size))).astype(F32)
            inputs = [
                floats(total, size), floats(total, size), rates,
                floats(total, states), floats(total, states), floats(size), floats(size),
            ]  # fmt: skip
        else:
            self.name, heads, groups = "mo.ssd.ragged", 6, 2 if op == "ssd_grouped" else 1
            shape = (heads, states, size)
            rates = -np.exp(rng.standard_normal(heads)).astype(F32)
            inputs = [
                floats(total, heads, size), floats(total, heads), rates, floats(total, groups, states),
                floats(total, groups, states), floats(heads), floats(heads),
            ]  # fmt: skip
        state = np.full((9, LAYERS, *shape), np.nan, F32)
        for cached, slot in zip(*where[1:], strict=True):
            if cached:
                state[slot, LAYER] = rng.standard_normal(shape)
        self.operands = [*inputs, *where, state, LAYER]
        self.result = (dtype, inputs[0].shape)

    def run(self, **options: Any) -> tuple[Array, Array]:
        """The result and the updated states."""
        operands = [x.copy() for x in self.operands]
        runner = Runner(self.name, operands, [self.result], self.attributes, **options)
        (out,) = runner()
        return out, runner.operands[-2]

    def reference(self) -> tuple[Array, Array]:
        operands = [x.copy() for x in self.operands]
        out = REFERENCES[self.name](*operands, **self.attributes)
        return out, operands[-2]


def assert_near(actual: Array, expected: Array, tolerance: float) -> None:
    np.testing.assert_array_equal(np.isnan(actual.astype(F32)), np.isnan(expected.astype(F32)))
    scale = max(1.0, float(np.nanmax(np.abs(expected), initial=0)))
    np.testing.assert_allclose(
        actual.astype(np.float64),
        expected.astype(np.float64),
        atol=tolerance * scale,
        rtol=tolerance,
    )


@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
@pytest.mark.parametrize("op", OPS)
def test_ragged_batches(op: str, machine: str) -> None:
    """Odd sizes; sequences of no token, one token, more than a chunk."""
    for seed, (lengths, size, state_size) in enumerate(
        [([7, 0, 1, 70], 37, 5), ([1, 1, 1], 64, 4), ([33], 3, 3), ([2, 64], 130, 9)]
    ):
        problem = Problem(op, lengths, size, state_size, F32, seed)
        (out, states), (expected, expected_states) = (
            problem.run(machine=machine),
            problem.reference(),
        )
        assert_near(out, expected, 2e-5)
        assert_near(states, expected_states, 2e-5)


@pytest.mark.parametrize("op", OPS)
def test_bfloat16_operands(op: str) -> None:
    problem = Problem(op, [5, 40], 24, 4, BF16, 1)
    (out, states), (expected, expected_states) = problem.run(), problem.reference()
    assert_near(out, expected.astype(BF16), 0.01)
    assert_near(states, expected_states, 2e-5)


@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_the_number_of_workers(op: str) -> None:
    problem = Problem(op, [35, 2], 40, 6, F32, 2)
    for one, three in zip(problem.run(workers=1), problem.run(workers=3), strict=True):
        np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize("op", OPS)
def test_a_sequence_in_chunks_equals_the_whole_sequence(op: str) -> None:
    """Chunks and single tokens, from a slot that holds NaN."""
    whole = Problem(op, [50], 21, 4, F32, 3)
    whole.operands[-4][0] = 0
    whole.operands[-2][:] = np.nan
    expected, after = whole.run()
    rows = [i for i, x in enumerate(whole.operands[:-5]) if len(x) == 50]
    bounds = [0, 11, 12, 13, 45, 50]
    state, parts = whole.operands[-2].copy(), []
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        piece = Problem(op, [end - begin], 21, 4, F32, 3)
        piece.operands = [x.copy() for x in whole.operands]
        for i in rows:
            piece.operands[i] = whole.operands[i][begin:end]
        piece.operands[-5] = np.array([0, end - begin], np.uint32)
        piece.operands[-4] = np.array([begin], np.uint32)
        piece.operands[-2] = state
        piece.result = (F32, piece.operands[0].shape)
        part, state = piece.run()
        parts.append(part)
    assert_near(np.concatenate(parts), expected, 1e-5)
    assert_near(state, after, 1e-5)


@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        (-3, [9, 0], "9"),
        (-3, [1, 1], "both 1"),
        (-5, [0, 3, 6], "expected 5"),
        (-5, [1, 3, 5], "expected 0"),
        (-5, [0, 6, 5], "expected 6 or more"),
        (-4, [0, 0, 0], "cache_lengths has size 3"),
        (-1, 3, "layer 3; the states have 3 layers"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_bad_slots_offsets_and_layers_are_refused(
    op: str, which: int, value: Any, message: str
) -> None:
    problem = Problem(op, [2, 3], 5, 3, F32, 4)
    problem.operands[which] = np.array(value, np.uint32)
    with pytest.raises((IndexError, ValueError), match=message):
        problem.run()
    with pytest.raises((IndexError, ValueError)):
        problem.reference()


@pytest.mark.parametrize("op", OPS)
def test_shapes_that_do_not_fit_are_refused(op: str) -> None:
    for which in (1, 2, -2):
        problem = Problem(op, [2, 3], 5, 3, F32, 4)
        operand = problem.operands[which]
        problem.operands[which] = np.concatenate([operand, operand], axis=-1)
        with pytest.raises((NotImplementedError, ValueError), match=r"expected|state of|x, dt, a"):
            problem.run()
