"""Decides whether attention over cached latents expands keys and values, and whether it selects tokens."""

from __future__ import annotations

from dataclasses import dataclass

from max.graph import TensorValue
from max.graph.ops._stage import stage_declared
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = ["Expansion", "plan_latents"]

LEAST_ROWS = 64
"""The fewest new tokens of a batch for which keys and values are expanded (docs/log/2026-11-23-latents.md)."""
MOST_CACHED = 3
"""The maximum number of cached tokens per new token; bounds the memory of expanded keys."""


@dataclass(frozen=True)
class Expansion:
    """The savings and the cost of expanding latents to keys and values, in multiplications per head.

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
        """The multiplications saved per pair of a query and a token."""
        return 2 * self.rank - self.plain - self.value

    @property
    def spent(self) -> int:
        """The multiplications per expanded token; a query projected into the latent space costs the same."""
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
        expansion: The savings and the cost of expansion; None: keys and values are never expanded.
        count: The maximum number of tokens that a token attends to; 0: all.

    Returns:
        Whether keys and values are expanded, and whether tokens are selected: bool, rank 0.
    """
    pays = expansion if expansion is not None and expansion.saved > 0 else None
    plan = stage_declared(
        "latents.plan.ragged",
        [input_row_offsets, kv_collection.cache_lengths],
        {
            "least_rows": LEAST_ROWS if pays else 0,
            "most_cached": MOST_CACHED,
            "saved": pays.saved if pays else 0,
            "spent": pays.spent if pays else 0,
            "count": count,
        },
    )[0]
    return plan[0] != 0, plan[1] != 0
