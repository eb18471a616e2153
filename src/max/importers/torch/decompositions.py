"""The decompositions of torch that are applied before a graph is staged."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import default_decompositions

__all__ = ["decompositions"]

_KEPT = (
    # of its parts, the test whether a row is masked reads the scores once more, and attention is not fused
    torch.ops.aten._safe_softmax.default,
)
"""Ops with functions of their own that say more than their parts."""


def decompositions() -> dict[Any, Any]:
    """For each op that torch decomposes how it does; the table of `importers.torch` has functions for what is left."""
    table: dict[Any, Any] = {**default_decompositions()}
    for op in _KEPT:
        table.pop(op, None)
    return table
