"""Counts of a cache's use, and tensors of a batch's greatest lengths."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from max.driver import Buffer

__all__ = ["KVCacheMetrics", "build_max_lengths_tensors"]


@dataclass
class KVCacheMetrics:
    """Usage counters of a cache; ``a + b`` adds them. `max serve` reports them in ``/metrics``.

    Attributes:
        input_tokens: Prompt tokens that were computed.
        cache_tokens: Prompt tokens that were found in the cache.
        device_blocks_served: Cached blocks on the device that were reused.
        h2d_bytes_copied: Bytes copied from the host to a device.
        d2h_bytes_copied: Bytes copied from a device to the host.
        cross_replica_blocks_copied: Blocks copied between replicas.
        cross_replica_bytes_copied: Bytes copied between replicas.
        disk_bytes_written: Bytes written to the disk.
        disk_bytes_read: Bytes read from the disk.
        inflight_disk_ops: Disk operations in flight.
    """

    input_tokens: int = 0
    cache_tokens: int = 0
    device_blocks_served: int = 0
    h2d_bytes_copied: int = 0
    d2h_bytes_copied: int = 0
    cross_replica_blocks_copied: int = 0
    cross_replica_bytes_copied: int = 0
    disk_bytes_written: int = 0
    disk_bytes_read: int = 0
    inflight_disk_ops: int = 0

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens."""
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """The fraction of prompt tokens that were found in the cache; 0 without prompt tokens."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: KVCacheMetrics) -> KVCacheMetrics:
        """The sum of the counters."""
        if not isinstance(other, KVCacheMetrics):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        return KVCacheMetrics(**{n: getattr(self, n) + getattr(other, n) for n in names})


# the decorator looks the module up, which may not be loaded
KVCacheMetrics.__module__ = "max.nn.kv_cache.metrics"


def build_max_lengths_tensors(
    max_prompt_length: int, max_cache_length: int
) -> tuple[Buffer, Buffer]:
    """Converts the maximum lengths of a batch to tensors: each one uint32 on the CPU.

    Args:
        max_prompt_length: The maximum number of new tokens of a sequence.
        max_cache_length: The maximum number of tokens of a sequence in the cache, new ones included.

    Raises:
        OverflowError: A length is negative, or does not fit 32 bits.
        TypeError: A length is not an integer.
    """
    lengths = {"max_prompt_length": max_prompt_length, "max_cache_length": max_cache_length}
    for name, length in lengths.items():
        if not isinstance(length, int | np.integer) or isinstance(length, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"build_max_lengths_tensors: {name} is {length!r}, expected an integer")
        if not 0 <= length < 1 << 32:
            raise OverflowError(f"build_max_lengths_tensors: {name} is {length}, expected a uint32")
    prompt, cache = (Buffer.from_numpy(np.array([n], np.uint32)) for n in lengths.values())
    return prompt, cache
