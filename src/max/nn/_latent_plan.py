"""When attention over cached latents expands keys and values, and when it selects tokens."""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.graph import TensorType, TensorValue, ops
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = ["Expansion", "plan_latents"]

LEAST_ROWS = 64
"""The fewest new tokens of a batch for which keys and values are expanded (docs/log/2026-11-23-latents.md)."""
MOST_CACHED = 3
"""The most cached tokens for each new one; it bounds the memory of expanded keys."""


@dataclass(frozen=True)
class Expansion:
    """What the expansion of latents to keys and values saves and costs, in products of elements for each head.

    Args:
        rank: The size of a latent.
        plain: The size of the part of an expanded key without positions.
        value: The size of an expanded value.
    """

    rank: int
    plain: int
    value: int

    @property
    def saved(self) -> int:
        """For a pair of a query and a token."""
        return 2 * self.rank - self.plain - self.value

    @property
    def spent(self) -> int:
        """For a token; new tokens cost as much where queries are brought into the space of latents instead."""
        return self.rank * (self.plain + self.value)


def plan_latents(
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    *,
    expansion: Expansion | None = None,
    count: int = 0,
) -> tuple[TensorValue, TensorValue]:
    """Decides for a batch, when the graph runs, how it attends to latents.

    With batch-invariant kernels nothing is expanded, and tokens are always selected.

    Args:
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        expansion: What expanded keys and values save; None: they are not expanded.
        count: The most tokens that a token sees; 0: all.

    Returns:
        Whether keys and values are expanded, and whether tokens are selected: bool, rank 0.
    """
    pays = expansion if expansion is not None and expansion.saved > 0 else None
    plan = ops.custom(
        "mo.latents.plan.ragged",
        device=input_row_offsets.device,
        values=[input_row_offsets, kv_collection.cache_lengths],
        out_types=[TensorType(DType.int32, [2], input_row_offsets.device)],
        parameters={
            "least_rows": LEAST_ROWS if pays else 0,
            "most_cached": MOST_CACHED,
            "saved": pays.saved if pays else 0,
            "spent": pays.spent if pays else 0,
            "count": count,
        },
    )[0].tensor
    return plan[0] != 0, plan[1] != 0
