"""Divides a machine among the replicas of a model: each has cores and a share of the memory of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

from max._host import logical_cpus
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.core.exceptions import ConfigError
from max.serve.process.settings import WorkerSettings

_SHARE = "device_memory_utilization"


def replica_settings(
    settings: WorkerSettings, count: int, cores: Sequence[int] | None = None
) -> list[WorkerSettings]:
    """The settings of the workers of replicas on one machine.

    Args:
        settings: Those of a worker that has the machine alone.
        count: The number of replicas, at least 1.
        cores: The numbers of the logical CPUs to divide; None: those of this process.

    Raises:
        ConfigError: There are fewer cores than replicas.
    """
    if count == 1:
        return [settings]
    cores = sorted(logical_cpus()) if cores is None else cores
    if count > len(cores):
        raise ConfigError(
            f"{count} replicas on {len(cores)} cores", f"Give at most {len(cores)} --replicas."
        )
    (default,) = (each.default for each in dataclasses.fields(KVCacheConfig) if each.name == _SHARE)
    # they plan their memory at the same time, each from all that is free
    share = settings.config.get(_SHARE, default) / count
    config = {**settings.config, _SHARE: share}
    bounds = [len(cores) * number // count for number in range(count + 1)]
    # neighbors, as cores next to each other often share a cache
    parts = [cores[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    return [replace(settings, config=config, cores=tuple(part)) for part in parts]
