"""The interface of attention layers over several devices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from max.graph import BufferValue, TensorValue
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module

__all__ = ["DistributedAttentionImpl"]


class DistributedAttentionImpl(Module):
    """Attention that takes and returns one tensor per device."""

    @abstractmethod
    def __call__(
        self,
        layer_idx: TensorValue,
        x: Sequence[TensorValue],
        signal_buffers: Sequence[BufferValue],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
    ) -> list[TensorValue]:
        """The attention outputs, one per device.

        Args:
            layer_idx: The index of the layer in the caches, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]`` on each device.
            signal_buffers: The buffers of collectives.
            kv_collections: The cache of each device.
            freqs_cis: The rope's table on each device.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``, on each device.
        """
