"""Attention and RoPE of trees of drafted tokens, whose rows see the cached tokens and their ancestors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._backends.program import KernelRunError
from max._interpreter.core import REFERENCES
from tests.cpu_kernels.harness import interpreted, run
from tests.cpu_kernels.test_attention import BF16, F32, Cache, make_cache, reference
from tests.cpu_kernels.test_cache_and_rope import positions, rotated
from tests.tolerance import assert_close

ATTENTION, ROPE = "mo.attention.ragged.paged", "mo.rope.ragged.paged"
MACHINES = ("host", "avx2", "generic", "invariant host")


def random_paths(rows: int, draw: np.random.Generator) -> list[list[int]]:
    """For each row of a random tree its ancestors and itself, in order."""
    paths: list[list[int]] = [[0]]
    for row in range(1, rows):
        # a chain at the beginning, as after tokens that a grammar forced
        parent = row - 1 if row < 3 else int(draw.integers(0, row))
        paths.append([*paths[parent], row])
    return paths


def trees_of(cache: Cache, draw: np.random.Generator) -> tuple[list[list[int] | None], np.ndarray]:
    """Random trees of about half of the sequences of up to 64 rows: the path of each row of the batch, None for one
    that sees all rows before it, and the bits of these paths.
    """
    paths: list[list[int] | None] = []
    for rows in np.diff(cache.offsets.astype(int)).tolist():
        is_tree = 0 < rows <= 64 and draw.random() < 0.7
        paths += random_paths(rows, draw) if is_tree else [None] * rows
    bits = [sum(1 << row for row in path or ()) for path in paths]
    return paths, np.array(bits, np.uint64)


def attended(
    cache: Cache, paths: list[list[int] | None], scale: float, softcap: float = 0.0
) -> np.ndarray:
    """Each row on its own: a text of the cached tokens and of its path alone."""
    out = reference(cache, scale, "causal", -1, softcap)
    heads, kv_heads, size = cache.q.shape[1], cache.blocks.shape[4], cache.blocks.shape[3]
    for b, cached in enumerate(cache.cache_lengths.astype(int)):
        begin = int(cache.offsets[b])
        for row in range(begin, int(cache.offsets[b + 1])):
            path = paths[row]
            if path is None:
                continue
            tokens = np.array([*range(cached), *(cached + other for other in path)])
            rows = cache.blocks[
                cache.lookup_table[b][tokens // size], :, cache.layer, tokens % size
            ].astype(np.float64)
            for h in range(heads):
                keys, values = (rows[:, side, h * kv_heads // heads] for side in (0, 1))
                scores = keys @ cache.q[row, h].astype(np.float64) * scale
                if softcap:
                    scores = np.tanh(scores / softcap) * softcap
                weights = np.exp(scores - scores.max())
                out[row, h] = weights @ values / weights.sum()
    return out


def attend(cache: Cache, bits: np.ndarray, scale: float, softcap: float = 0.0, **options: object):
    attributes = {
        "mask": "causal", "local_window_size": -1, "softcap": softcap, "sinks": False, "trees": True,
    }  # fmt: skip
    results = [(cache.q.dtype, cache.q.shape)]
    return run(ATTENTION, [*cache.operands(scale), bits], results, attributes, **options)[0]


SHAPES = given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([16, 33, 64]),
    page_size=st.sampled_from([1, 7, 16, 128]),
    dtype=st.sampled_from([F32, BF16]),
    softcap=st.sampled_from([0.0, 1.5]),
    machine=st.sampled_from(MACHINES),
    seed=st.integers(0, 1 << 20),
)


@SHAPES
@settings(max_examples=5, deadline=None)
def test_random_trees(lengths, heads, head_dim, page_size, dtype, softcap, machine, seed) -> None:
    cache = make_cache(lengths, *heads, head_dim, page_size, dtype, seed)
    if not len(cache.q):
        return
    paths, bits = trees_of(cache, np.random.default_rng(seed))
    want = attended(cache, paths, 0.4, softcap)
    got = attend(cache, bits, 0.4, softcap, machine=machine)
    assert_close(got, want.astype(dtype), dtype=dtype)
    attributes = {"softcap": softcap, "trees": True}
    defined = REFERENCES[ATTENTION](*cache.operands(0.4), bits, **attributes)
    assert_close(defined, want.astype(F32), dtype=F32)


@pytest.mark.long
@SHAPES
@settings(max_examples=150, deadline=None)
def test_random_trees_long(**drawn: object) -> None:
    test_random_trees.hypothesis.inner_test(**drawn)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("machine", MACHINES)
def test_trees_beside_prompts(machine: str, dtype: np.dtype) -> None:
    """Few and many rows: the cache is read in place, and packed."""
    cache = make_cache([(200, 4), (0, 19), (33, 64), (127, 2)], 6, 2, 48, 32, dtype)
    paths, bits = trees_of(cache, np.random.default_rng(2))
    assert_close(
        attend(cache, bits, 0.4, machine=machine),
        attended(cache, paths, 0.4).astype(dtype),
        dtype=dtype,
    )


@pytest.mark.parametrize("machine", ["avx2", "invariant avx2", "tiles pairs"])
def test_trees_in_the_interpreter(machine: str) -> None:
    """The interpreter of kernels checks each index, also of shifts of bits."""
    dtype = BF16 if machine.startswith("tiles") else F32
    cache = make_cache([(9, 5), (3, 0), (0, 9), (2, 1)], 2, 1, 8, 4, dtype)
    paths, bits = trees_of(cache, np.random.default_rng(5))
    assert any(bits), "one is a tree"
    attributes = {"mask": "causal", "trees": True}
    results = [(cache.q.dtype, cache.q.shape)]
    (got,) = interpreted(
        ATTENTION, [*cache.operands(0.3), bits], results, attributes, machine=machine
    )
    assert_close(got, attended(cache, paths, 0.3).astype(dtype), dtype=dtype)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_tree_behind_a_long_text(workers: int) -> None:
    """Its context is split, and the last part has keys of other branches only for some rows."""
    cache = make_cache([(5000, 4)], 4, 1, 32, 128, F32)
    paths = [[0], [0, 1], [0, 2], [0, 2, 3]]
    bits = np.array([1, 3, 5, 13], np.uint64)
    got = attend(cache, bits, 0.3, workers=workers)
    assert_close(got, attended(cache, paths, 0.3).astype(F32), dtype=F32)


def test_without_a_tree_rows_see_all_before_them() -> None:
    cache = make_cache([(20, 3), (0, 70)], 4, 2, 16, 8, F32)
    want = reference(cache, 0.3, "causal", -1).astype(F32)
    for bits in (np.zeros(0, np.uint64), np.zeros(73, np.uint64)):
        assert_close(attend(cache, bits, 0.3), want, dtype=F32)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rotates_cache", [True, False])
def test_positions_of_a_tree(machine: str, rotates_cache: bool, rng: np.random.Generator) -> None:
    cache = make_cache([(5, 7), (0, 4), (3, 70), (9, 64)], 4, 2, 24, 8, F32)
    freqs = rng.uniform(-1, 1, (90, 24)).astype(F32)
    paths, bits = trees_of(cache, np.random.default_rng(3))
    want_q, want_blocks = cache.q.astype(np.float64), cache.blocks.astype(np.float64)
    sequences = np.repeat(np.arange(4), np.diff(cache.offsets.astype(int)))
    for row, at, page, slot in positions(cache):
        path = paths[row]
        if path is not None:
            at = int(cache.cache_lengths[sequences[row]]) + len(path) - 1
        want_q[row] = rotated(cache.q[row], freqs[at], True)
        if rotates_cache:
            key = cache.blocks[page, 0, cache.layer, slot]
            want_blocks[page, 0, cache.layer, slot] = rotated(key, freqs[at], True)
    assert any(path is not None and len(path) <= own for own, path in enumerate(paths))
    operands = [cache.q, cache.offsets, freqs, *cache.operands(1.0)[2:7], bits]
    attributes = {"interleaved": True, "rotates_cache": rotates_cache, "trees": True}
    copied = [operand.copy() for operand in operands]
    defined = REFERENCES[ROPE](*copied, **attributes)
    (got,) = run(ROPE, operands, [(F32, cache.q.shape)], attributes, machine=machine)
    for queries, blocks in ((got, cache.blocks), (defined, copied[3])):
        assert_close(queries, want_q.astype(F32), dtype=F32)
        assert_close(blocks, want_blocks.astype(F32), dtype=F32)


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (
            [1, 3, 5, 1],
            "ancestors of row 3 of sequence 0 are 1; expected its own bit as the highest",
        ),
        ([1, 3, 5, 24], "ancestors of row 3 of sequence 0 are 24;"),
        ([2, 3, 5, 9], "ancestors of row 0 of sequence 0 are 2;"),
        ([1, 3, 5], "ancestors has size 3, expected 4"),
        ([1, 3, 5, 9, 1], "ancestors has size 5, expected 4"),
    ],
)
def test_bad_ancestors_raise(bits: list[int], message: str) -> None:
    cache = make_cache([(6, 4)], 2, 2, 16, 8, F32)
    own, freqs = np.array(bits, np.uint64), np.zeros((32, 16), F32)
    rope = [cache.q, cache.offsets, freqs, *cache.operands(1.0)[2:7], own]
    with pytest.raises(KernelRunError, match=message):
        attend(cache, own, 1.0)
    with pytest.raises(KernelRunError, match=message):
        run(ROPE, rope, [(F32, cache.q.shape)], {"trees": True})
    with pytest.raises(ValueError, match=message):
        REFERENCES[ATTENTION](*cache.operands(1.0), own, trees=True)


def test_a_tree_has_at_most_64_rows() -> None:
    cache = make_cache([(2, 65)], 1, 1, 16, 8, F32)
    bits = np.zeros(65, np.uint64)
    bits[64] = 1
    with pytest.raises(KernelRunError, match="ancestors of row 64 of sequence 0 are 1"):
        attend(cache, bits, 1.0)
    bits[63:] = 1 << 63, 0
    attend(cache, bits, 1.0)
