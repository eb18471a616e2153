"""The gated delta rule against a recurrence in NumPy and the torch functions of transformers."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from max._backends.program import KernelRunError
from max._interpreter.core import REFERENCES
from tests.cpu_kernels.harness import run
from tests.tolerance import assert_close

OP = "mo.gated_delta.ragged"
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]


def operands(
    rng: np.random.Generator,
    lengths: list[int],
    sizes: tuple[int, int, int, int],
    dtype: np.dtype[Any] = F32,
    fresh: tuple[int, ...] = (),
) -> list[Array]:
    """Random operands; `sizes`: heads, key heads, key size, value size; `fresh`: sequences without cached tokens."""
    heads, key_heads, key_dim, value_dim = sizes
    total, batch = sum(lengths), len(lengths)

    def floats(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    return [
        floats(total, key_heads, key_dim),
        floats(total, key_heads, key_dim),
        floats(total, heads, value_dim),
        -np.abs(floats(total, heads)) * np.exp(floats(1, heads)).astype(dtype),
        rng.random((total, heads)).astype(dtype),
        np.cumsum([0, *lengths]).astype(np.uint32),
        np.array([0 if i in fresh else 3 for i in range(batch)], np.uint32),
        rng.permutation(batch + 2)[:batch].astype(np.uint32),
        rng.standard_normal((batch + 2, 3, heads, key_dim, value_dim)).astype(F32),
        np.array(1, np.uint32),
    ]


def recurrence(
    q: Array, keys: Array, values: Array, gates: Array, rates: Array, offsets: Array, lengths: Array, slots: Array,
    buffer: Array, layer: Array, scale: float, normalized: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """The rule in float64, head by head."""
    out, buffer = np.zeros(values.shape), buffer.astype(np.float64)
    states = buffer[:, int(layer)]
    for b, slot in enumerate(slots):
        if not lengths[b] and offsets[b] < offsets[b + 1]:
            states[slot] = 0
        for t in range(offsets[b], offsets[b + 1]):
            for h in range(values.shape[1]):
                source = h // (values.shape[1] // keys.shape[1])
                query, key = q[t, source].astype(np.float64), keys[t, source].astype(np.float64)
                if normalized:
                    query = query / np.sqrt(query @ query + 1e-6)
                    key = key / np.sqrt(key @ key + 1e-6)
                state = states[slot, h] * np.exp(np.float64(gates[t, h]))
                state += np.outer(key, np.float64(rates[t, h]) * (values[t, h] - key @ state))
                states[slot, h], out[t, h] = state, scale * (query @ state)
    return out, buffer


def check(given_operands: list[Array], normalized: bool, scale: float, **options: Any) -> None:
    arrays = copy.deepcopy(given_operands)
    values = arrays[2]
    attributes = {"scale": scale, "normalized": normalized}
    (got,) = run(OP, arrays, [(values.dtype, values.shape)], attributes, **options)
    want, states = recurrence(*given_operands, scale, normalized)
    error = 1e-2 if values.dtype == BF16 else 2e-6 if normalized else 1e-4
    np.testing.assert_allclose(got.astype(F32), want, atol=error * np.abs(want).max(initial=1))
    # other slots and layers are unchanged
    np.testing.assert_allclose(arrays[8], states, atol=error * np.abs(states).max())
    for before, after in zip(given_operands[:8], arrays[:8], strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("machine", "dtype"), [("host", F32), ("host", BF16), ("avx2", F32), ("generic", F32)]
)
def test_chunks_and_steps(rng: np.random.Generator, dtype: np.dtype[Any], machine: str) -> None:
    """Sequences of no token, one, several, a chunk and more; heads that do not fill a vector."""
    for lengths, sizes in (
        ([1, 70, 0, 7, 9], (4, 2, 11, 37)),
        ([65], (3, 1, 33, 64)),
    ):
        check(operands(rng, lengths, sizes, dtype, (1,)), True, sizes[2] ** -0.5, machine=machine)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=4),
    st.tuples(st.sampled_from([1, 3]), st.integers(1, 2), st.integers(1, 40), st.integers(1, 40)),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_random_shapes(
    lengths: list[int],
    shape: tuple[int, int, int, int],
    fresh: bool,
    workers: int,
    seed: int,
) -> None:
    group, key_heads, key_dim, value_dim = shape
    sizes = (group * key_heads, key_heads, key_dim, value_dim)
    begins = tuple(range(0, len(lengths), 2)) if fresh else ()
    arrays = operands(np.random.default_rng(seed), lengths, sizes, fresh=begins)
    check(arrays, True, 0.7, workers=workers)


def test_plain_keys_and_closed_gates(rng: np.random.Generator) -> None:
    """Keys that are not normalized, decays of 0 and of infinite logarithms, rates of 0 and 1."""
    arrays = operands(rng, [50, 5], (2, 2, 8, 8))
    arrays[1] /= 4
    arrays[3][[3, 20, 52]] = -np.inf
    arrays[3][[4, 21]] = 0
    arrays[4][[5, 30]], arrays[4][[6, 31]] = 0, 1
    check(arrays, False, 0.5)


def test_functions_of_transformers(rng: np.random.Generator) -> None:
    """One sequence: a prompt, then single steps from its state."""
    arrays = operands(rng, [83], (6, 2, 24, 20), fresh=(0,))
    attributes = {"scale": 24**-0.5, "normalized": True}
    tensors = [torch.from_numpy(x[None]) for x in arrays[:5]]
    slot, states = int(arrays[7][0]), arrays[8]
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want, state = torch_chunk_gated_delta_rule(*(x[:, :80] for x in tensors), **options)
    for begin, end in ((0, 80), (80, 81), (81, 83)):
        if begin:
            want, state = torch_recurrent_gated_delta_rule(
                *(x[:, begin:end] for x in tensors), initial_state=state, **options
            )
        rows = [x[begin:end] for x in arrays[:5]]
        counts = [
            np.array([0, end - begin], np.uint32),
            np.array([begin], np.uint32),
            *arrays[7:],
        ]
        (got,) = run(OP, [*rows, *counts], [(F32, (end - begin, 6, 20))], attributes)
        np.testing.assert_allclose(got, want[0].numpy(), atol=2e-6)
        np.testing.assert_allclose(states[slot, 1], state[0].numpy(), atol=2e-6)


def test_the_definition_of_the_interpreter(rng: np.random.Generator) -> None:
    arrays = operands(rng, [5, 0, 2], (4, 2, 3, 5), fresh=(0, 1))
    for normalized in (True, False):
        states = arrays[8].copy()
        got = REFERENCES[OP](*arrays[:8], states, arrays[9], scale=0.3, normalized=normalized)
        want, after = recurrence(*arrays, 0.3, normalized)
        assert_close(got, want)
        assert_close(states, after.astype(F32))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (7, [1, 4, 0], r"slots\[1\] is 4, expected less than 4, the number of states"),
        (7, [1, 3, 1], r"slots\[0\] and slots\[2\] are both 1, expected a state for each"),
        (5, [0, 4, 3, 9], r"input_row_offsets\[2\] is 3, expected 4 or more"),
        (5, [0, 4, 6, 8], r"input_row_offsets\[3\] is 8, expected 9"),
        (6, [0, 0], r"cache_lengths has size 2, expected 3"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_invalid_slots_offsets_and_layers_raise(
    rng: np.random.Generator, at: int, value: list[int], message: str, workers: int
) -> None:
    arrays = operands(rng, [4, 2, 3], (2, 1, 4, 4))
    arrays[8] = arrays[8][:4]
    arrays[7] = np.array([1, 3, 0], np.uint32)
    run(OP, arrays, [(F32, (9, 2, 4))], {"scale": 1.0, "normalized": True}, workers=workers)
    arrays[at] = np.array(value, np.uint32)
    with pytest.raises(KernelRunError, match=message):
        run(OP, arrays, [(F32, (9, 2, 4))], {"scale": 1.0, "normalized": True}, workers=workers)


@pytest.mark.parametrize(
    ("at", "shape", "dtype", "message"),
    [
        (8, (4, 1, 2, 4, 5), F32, "state is .*, expected"),
        (1, (9, 1, 5), F32, "expected one shape"),
        (3, (9, 1), F32, "decays is .*, expected 2"),
        (8, (4, 1, 2, 4, 4), BF16, "state is .*, expected float32"),
        (7, (3,), np.dtype(np.int64), "slots is .*, expected uint32"),
    ],
)
def test_operands_that_do_not_fit(
    rng: np.random.Generator, at: int, shape: tuple[int, ...], dtype: np.dtype[Any], message: str
) -> None:
    arrays = operands(rng, [4, 2, 3], (2, 1, 4, 4))
    arrays[at] = np.zeros(shape, dtype)
    with pytest.raises(NotImplementedError, match=message):
        run(OP, arrays, [(F32, (9, 2, 4))], {"scale": 1.0, "normalized": True})
