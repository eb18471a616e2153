"""Counts of a cache's use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["KVCacheMetrics"]


@dataclass
class KVCacheMetrics:
    """Counts of a cache's use; the sum of two has the counts of both. `max serve` reports its counts in ``/metrics``.

    Attributes:
        input_tokens: Tokens of prompts that were computed.
        cache_tokens: Tokens of prompts that were found in the cache.
        device_blocks_served: Blocks on the device that were found.
        h2d_bytes_copied: Bytes copied from the host to a device.
        d2h_bytes_copied: Bytes copied from a device to the host.
        cross_replica_blocks_copied: Blocks copied between replicas.
        cross_replica_bytes_copied: Bytes copied between replicas.
        disk_bytes_written: Bytes written to the disk.
        disk_bytes_read: Bytes read from the disk.
        inflight_disk_ops: Operations of the disk that are not complete.
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
        """All tokens of prompts."""
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens that were found; 0 without any."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: KVCacheMetrics) -> KVCacheMetrics:
        """The counts of both."""
        if not isinstance(other, KVCacheMetrics):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        return KVCacheMetrics(**{n: getattr(self, n) + getattr(other, n) for n in names})
