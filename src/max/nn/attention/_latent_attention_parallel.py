"""Multi-head latent attention over several devices, which divide the heads or the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.graph import (
    BufferValue,
    ShardingStrategy,
    TensorValue,
)
from max.nn.attention._latent_attention import LatentAttentionWithRope
from max.nn.comm import Allreduce
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layers.sharding import call_parts

__all__ = ["DataParallelLatentAttentionWithRope", "TensorParallelLatentAttentionWithRope"]


class _LatentAttentionOverDevices(LatentAttentionWithRope):
    """Base of latent attention with parts on several devices."""

    _shards: list[LatentAttentionWithRope]

    def _place(self, strategy: ShardingStrategy) -> None:
        self.sharding_strategy = strategy
        self._shards = self.shard(self.devices)

    def _each(
        self,
        layer_idx: TensorValue,
        xs: Sequence[TensorValue],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
    ) -> list[TensorValue]:
        """The outputs of all parts."""
        return call_parts(
            type(self).__name__,
            self._shards,
            layer_idx,
            xs=xs,
            kv_collections=kv_collections,
            freqs_cis=freqs_cis,
            input_row_offsets=input_row_offsets,
        )


class TensorParallelLatentAttentionWithRope(_LatentAttentionOverDevices):
    """`LatentAttentionWithRope` with a part of the heads on each device; the results are summed.

    Each device has the whole cache. The arguments are those of `LatentAttentionWithRope`.

    Raises:
        ValueError: There are fewer than 2 devices, or the heads cannot be divided evenly over them.
    """

    __module__ = "max.nn.attention.multi_latent_attention"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        count = len(self.devices)
        if count < 2:
            raise ValueError(f"{type(self).__name__}: {count} devices, expected 2 or more")
        self._place(ShardingStrategy.tensor_parallel(count))
        self.allreduce = Allreduce(count)

    def __call__(  # type: ignore[override]
        self,
        layer_idx: TensorValue,
        xs: Sequence[TensorValue],
        signal_buffers: Sequence[BufferValue],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
    ) -> list[TensorValue]:
        """The attention output on each device.

        Args: those of `LatentAttentionWithRope`, one per device, and the signal buffers of the collective.

        Raises:
            ValueError: The number of values differs from the number of devices.
        """
        parts = self._each(layer_idx, xs, kv_collections, freqs_cis, input_row_offsets)
        return self.allreduce(parts, signal_buffers)


class DataParallelLatentAttentionWithRope(_LatentAttentionOverDevices):
    """`LatentAttentionWithRope` on each device, for its own part of the batch and with its own cache.

    The arguments are those of `LatentAttentionWithRope`.
    """

    __module__ = "max.nn.attention.multi_latent_attention"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._place(ShardingStrategy.replicate(len(self.devices)))

    def __call__(  # type: ignore[override]
        self,
        layer_idx: TensorValue,
        xs: Sequence[TensorValue],
        signal_buffers: Sequence[BufferValue],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
    ) -> list[TensorValue]:
        """The attention output on each device.

        Args: those of `LatentAttentionWithRope`, one per device; the signal buffers are not used.

        Raises:
            ValueError: The number of values differs from the number of devices.
        """
        return self._each(layer_idx, xs, kv_collections, freqs_cis, input_row_offsets)
