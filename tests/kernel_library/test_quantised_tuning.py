"""Passes of the GEMV path, and the parameters of processor families."""

from __future__ import annotations

import pytest

from max import kernel as k
from max._kernel_library.products.quantised.packed import FORMATS
from max._kernel_library.products.quantised.packed_matmul import (
    AMX_ROW_THRESHOLD,
    GEMV_PASSES,
    NARROW_ROW_THRESHOLD,
    default_threshold,
)
from max._kernel_library.products.quantised.tuning import tuning_of
from max._kernel_library.products.quantised.unpacking import quantised_tiling

DOT = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512vnni"})


def cpu(name: str, features: frozenset[str] = DOT) -> k.CPUTarget:
    return k.CPUTarget(features, "x86_64-unknown-linux-gnu", name)


def passes(rows: int) -> list[int]:
    """The rows of each pass over a weight, as `gemv_strip` chooses them."""
    chosen: list[int] = []
    for count in GEMV_PASSES:
        while sum(chosen) + count <= rows:
            chosen.append(count)
    return chosen


def test_more_rows_never_take_fewer_passes() -> None:
    """A pass reads the weight and unpacks it: a batch of one more row must not save one."""
    counts = [len(passes(rows)) for rows in range(1, 65)]
    assert counts == sorted(counts)
    assert counts == [-(-rows // max(GEMV_PASSES)) for rows in range(1, 65)]
    assert all(sum(passes(rows)) == rows for rows in range(65))


@pytest.mark.parametrize("encoding", FORMATS)
def test_a_family_has_its_prefetch_distance_and_threshold(encoding: str) -> None:
    form = FORMATS[encoding]
    default, zen4 = cpu("generic"), cpu("znver4")
    assert tuning_of(default) == tuning_of(cpu("of another family"))
    for target in (default, zen4):
        tiling, tuning = quantised_tiling(target, form), tuning_of(target)
        assert tiling.prefetch_distances == tuning.prefetch_distances
        assert len(tuning.prefetch_distances) == max(GEMV_PASSES)
        assert default_threshold(target, tiling) == tuning.row_threshold
    assert tuning_of(zen4).prefetch_distances < tuning_of(default).prefetch_distances
    assert tuning_of(zen4).row_threshold > tuning_of(default).row_threshold


def test_targets_of_several_instructions_and_of_tiles_keep_their_thresholds() -> None:
    form = FORMATS["Q4_K"]
    narrow = cpu("znver4", frozenset({"avx2", "fma"}))
    tiles = cpu("znver4", DOT | {"amx-emulated"})
    assert default_threshold(narrow, quantised_tiling(narrow, form)) == NARROW_ROW_THRESHOLD
    assert tuning_of(narrow) == tuning_of(cpu("generic"))
    assert default_threshold(tiles, quantised_tiling(tiles, form)) == AMX_ROW_THRESHOLD
