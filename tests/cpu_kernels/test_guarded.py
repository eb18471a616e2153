"""Kernels access no memory outside of their tensors, which lie between guard pages."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu_kernels.harness import Runner
from tests.cpu_kernels.test_attention import make_cache
from tests.cpu_kernels.test_interpreted import CASES
from tests.guarded import Margins
from tests.tolerance import assert_close

OTHERS = [pytest.param(machine, marks=pytest.mark.long) for machine in ("avx2", "generic")]


def run_guarded(runner: Runner) -> None:
    """Runs a kernel with its memory at both ends of the accessible range and unguarded; the results must be equal."""
    before = copy.deepcopy(runner.operands)
    want = [x.copy() for x in (*runner(), *runner.operands)]
    for end in (True, False):
        margins = Margins()
        runner.operands = before
        runner.place(margins, end)
        got = [*runner(), *runner.operands]
        margins.check()
        for have, expected in zip(got, want, strict=True):
            if have.dtype.kind in "iub":
                np.testing.assert_array_equal(have, expected)
            else:
                assert_close(have, expected)


@pytest.mark.parametrize("machine", ["host", *OTHERS])
@pytest.mark.parametrize("name", CASES)
def test_no_access_outside_tensors(name: str, machine: str) -> None:
    # kernels change some operands in place
    run_guarded(Runner(*copy.deepcopy(CASES[name]), machine=machine))


@pytest.mark.long
@pytest.mark.parametrize("machine", ["host", "avx2", "generic", "tiles host"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@settings(max_examples=10)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (9, 3)]),
    head_dim=st.sampled_from([2, 8, 20, 64, 72]),
    page_size=st.sampled_from([1, 4, 5, 16, 130]),
    mask=st.sampled_from(["causal", "null", "sliding_window", "chunked_causal"]),
)
def test_no_access_outside_a_cache(
    machine: str,
    dtype: type,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    mask: str,
) -> None:
    cache = make_cache(lengths, *heads, head_dim, page_size, np.dtype(dtype))
    # the last page is used
    cache.lookup_table[0, 0] = len(cache.blocks) - 1
    operands = cache.operands(0.3)
    result = [(cache.q.dtype, cache.q.shape)]
    attributes = {"mask": mask, "local_window_size": 7}
    run_guarded(Runner("mo.attention.ragged.paged", operands, result, attributes, machine=machine))
    rows = np.ones((cache.q.shape[0], heads[1] * head_dim), dtype)
    rest = [cache.offsets, *operands[2:7]]
    run_guarded(Runner("mo.kv_store.ragged.paged", [rows, rows, *rest], [], machine=machine))
    angles = np.linspace(0, 1, 61 * head_dim, dtype=np.float32).reshape(61, head_dim)
    rotated = [cache.q, cache.offsets, angles, *operands[2:7]]
    run_guarded(Runner("mo.rope.ragged.paged", rotated, result, machine=machine))
