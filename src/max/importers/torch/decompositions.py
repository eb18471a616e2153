"""The decompositions of torch that are applied before a graph is staged."""

from __future__ import annotations

from typing import Any

__all__ = ["decompositions"]


def decompositions() -> dict[Any, Any]:
    """For each op that torch decomposes how it does; the table of `importers.torch` has functions for what is left."""
    # here, as the reference of the API is read without torch
    import torch
    from torch.export import default_decompositions

    table: dict[Any, Any] = {**default_decompositions()}
    # of its parts, the test whether a row is masked reads the scores once more, and attention is not fused
    table.pop(torch.ops.aten._safe_softmax.default, None)
    return table
