"""Attention over a paged cache in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.nn.harness import Array, f32


@dataclass
class PagedBatch:
    """A ragged batch with its cache, in random pages."""

    rng: np.random.Generator
    cached: list[int]
    new: list[int]
    kv_heads: int
    head_dim: int
    page_size: int
    layers: int = 2
    dtype: Any = np.float32
    blocks: Array = field(init=False)
    lookup_table: Array = field(init=False)

    def __post_init__(self) -> None:
        wanted = [-(-(c + n) // self.page_size) for c, n in zip(self.cached, self.new, strict=True)]
        width = max(*wanted, 1)
        pages = width * len(wanted) + 3
        shape = (pages, 2, self.layers, self.page_size, self.kv_heads, self.head_dim)
        self.blocks = self.rng.standard_normal(shape).astype(self.dtype)
        order = self.rng.permutation(pages)[: width * len(wanted)]
        self.lookup_table = order.reshape(len(wanted), width).astype(np.uint32)

    @property
    def offsets(self) -> Array:
        return np.cumsum([0, *self.new]).astype(np.uint32)

    @property
    def total(self) -> int:
        return sum(self.new)

    @property
    def cache_arrays(self) -> list[Array]:
        lengths = np.array([[max(self.new), max(self.cached)]], np.uint32)
        return [self.blocks, np.array(self.cached, np.uint32), self.lookup_table, lengths]

    def positions(self) -> list[tuple[int, int, int]]:
        """Yields row, sequence and position of each new token."""
        starts = self.offsets
        return [
            (int(starts[s]) + i, s, c + i)
            for s, (c, n) in enumerate(zip(self.cached, self.new, strict=True))
            for i in range(n)
        ]

    def slot(self, blocks: Array, side: int, layer: int, sequence: int, position: int) -> Array:
        page = self.lookup_table[sequence, position // self.page_size]
        return blocks[page, side, layer, position % self.page_size]

    def context(self, side: int, layer: int, sequence: int) -> torch.Tensor:
        """Returns keys (0) or values (1) of a sequence ``[length, kv_heads, head_dim]``."""
        length = self.cached[sequence] + self.new[sequence]
        rows = [self.slot(self.blocks, side, layer, sequence, p) for p in range(length)]
        return torch.from_numpy(f32(np.stack(rows)))

    def attention(
        self,
        q: Array,
        layer: int,
        scale: float,
        mask: str = "causal",
        window: int = -1,
        softcap: float | None = None,
        sinks: Array | None = None,
        slopes: Array | None = None,
    ) -> Array:
        """Returns the attention output ``[total, heads, head_dim]``, in float32."""
        out = np.zeros(q.shape, np.float32)
        group = q.shape[1] // self.kv_heads
        for s, (cached, new) in enumerate(zip(self.cached, self.new, strict=True)):
            if not new:
                continue
            begin = int(self.offsets[s])
            at = torch.arange(cached, cached + new)[:, None]
            key = torch.arange(cached + new)[None, :]
            seen = {
                "causal": key <= at,
                "null": torch.ones(new, cached + new, dtype=torch.bool),
                "sliding_window": (key <= at) & (at - key < window),
                "chunked_causal": (key <= at) & (key // window == at // window),
            }[mask]
            keys, values = (
                self.context(side, layer, s).repeat_interleave(group, 1).transpose(0, 1)
                for side in (0, 1)
            )
            queries = torch.from_numpy(f32(q[begin : begin + new])).transpose(0, 1)
            scores = queries @ keys.transpose(1, 2) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            if slopes is not None:
                scores = scores + torch.from_numpy(slopes)[:, None, None] * (key - at)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                column = torch.from_numpy(sinks)[:, None, None].expand(-1, new, 1)
                scores = torch.cat([scores, column], -1)
            weights = torch.softmax(scores, -1)[..., : cached + new]
            attended = weights @ values
            out[begin : begin + new] = attended.transpose(0, 1).numpy()
        return out
