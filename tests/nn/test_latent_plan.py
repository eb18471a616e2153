"""When attention over latents expands keys and values: products counted pair by pair, and what the op is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from max import _interpreter
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType
from max.nn.kernels.latents import Expansion, plan_latents

DEVICE = DeviceRef.CPU()
CHEAP = Expansion(rank=8, plain=3, value=4)
"""Saves 9 products of 16 for each pair; expanding a token takes 56."""


def planned(expansion: Expansion | None, **options: int) -> Graph:
    types = [TensorType(DType.uint32, (size,), DEVICE) for size in (Dim("batch") + 1, "batch")]
    with Graph("plan", input_types=types) as graph:
        offsets, lengths = (value.tensor for value in graph.inputs)
        cache = cast(Any, SimpleNamespace(cache_lengths=lengths))
        graph.output(*plan_latents(offsets, cache, expansion=expansion, **options))
    return graph


def plan(graph: Graph, new: list[int], cached: list[int]) -> list[bool]:
    offsets = np.cumsum([0, *new]).astype(np.uint32)
    return [bool(x) for x in _interpreter.run(graph, [offsets, np.array(cached, np.uint32)])]


def products(expansion: Expansion, new: list[int], cached: list[int]) -> tuple[int, int]:
    """The products for a head where each query sees the tokens before it: of latents, and of expanded keys."""
    latents = expanded = 0
    for rows, before in zip(new, cached, strict=True):
        # a query is brought into the space of latents, and its sum back
        latents += rows * (expansion.plain + expansion.value) * expansion.rank
        expanded += (before + rows) * (expansion.plain + expansion.value) * expansion.rank
        for row in range(rows):
            # half a pair for the query's own token, as the plan counts
            seen = before + row + 0.5
            latents += seen * 2 * expansion.rank
            expanded += seen * (expansion.plain + expansion.value)
    return latents, expanded


@pytest.mark.parametrize(
    ("new", "cached", "expands"),
    [
        ([64], [0], True),
        ([63], [0], False),  # too few rows
        ([40, 24], [0, 0], True),
        ([64], [192], True),  # three cached tokens a row
        ([64], [193], False),
        ([1] * 64, [3] * 64, False),  # a query a sequence: too few pairs for a token
        ([10] * 7, [14] * 7, True),
        ([2] * 35, [5] * 35, False),
    ],
)
def test_keys_are_expanded_where_that_takes_fewer_products(new, cached, expands):
    latents, expanded = products(CHEAP, new, cached)
    allowed = sum(new) >= 64 and sum(cached) <= 3 * sum(new)
    assert (allowed and expanded <= latents) == expands
    assert plan(planned(CHEAP), new, cached) == [expands, False]
    assert plan(planned(None), new, cached) == [False, False]
    # expanded keys and values of twice a latent save nothing
    assert plan(planned(Expansion(8, 9, 7)), new, cached) == [False, False]


def test_tokens_are_selected_where_a_sequence_has_more_than_the_count():
    assert plan(planned(None, count=20), [3, 1], [17, 2]) == [False, False]
    assert plan(planned(None, count=20), [3, 1], [18, 2]) == [False, True]
    assert plan(planned(CHEAP, count=20), [64], [0]) == [True, True]


@pytest.mark.parametrize("expansion", [None, CHEAP, Expansion(8, 9, 7), Expansion(8, 9, 6)])
def test_what_the_op_is_told(expansion):
    (op,) = [
        op
        for op in planned(expansion, count=5).mlir_op.block.ops
        if op.name == "mo.latents.plan.ragged"
    ]
    pays = expansion in (CHEAP, Expansion(8, 9, 6))
    sizes = {CHEAP: (9, 56), Expansion(8, 9, 6): (1, 120)}
    saved, spent = sizes[expansion] if pays else (0, 0)
    assert op.attrs == {
        "least_rows": 64 if pays else 0, "most_cached": 3, "saved": saved, "spent": spent, "count": 5,
    }  # fmt: skip
