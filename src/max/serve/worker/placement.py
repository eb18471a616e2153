"""Divides a machine among the replicas of a model: each has cores and a share of the memory of its own.

More replicas than cores share them, one core each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from max._host.machine import logical_cpus
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.core.exceptions import ConfigError
from max.serve.process.settings import DeployedModel, WorkerSettings

_SHARE = "device_memory_utilization"


def replica_settings(
    settings: WorkerSettings,
    count: int,
    cores: Sequence[int] | None = None,
    engines: int | None = None,
) -> list[WorkerSettings]:
    """The settings of the workers of replicas on one machine.

    Args:
        settings: Those of a worker that has the machine alone.
        count: The number of replicas, at least 1.
        cores: The numbers of the logical CPUs to divide; None: those of this process.
        engines: The engines that share the memory, of other models too; None: the replicas.
    """
    engines = engines or count
    if engines == 1 and cores is None:
        return [settings]
    cores = sorted(logical_cpus()) if cores is None else cores
    (default,) = (each.default for each in dataclasses.fields(KVCacheConfig) if each.name == _SHARE)
    # they plan their memory at the same time, each from all that is free
    share = settings.config.get(_SHARE, default) / engines
    config = {**settings.config, _SHARE: share}
    # [count + 1]: parts differ by one core at most
    bounds = [len(cores) * number // count for number in range(count + 1)]
    # neighbors, as cores next to each other often share a cache
    parts = [cores[begin : max(end, begin + 1)] for begin, end in pairwise(bounds)]
    return [replace(settings, config=config, cores=tuple(part)) for part in parts]


def deployment_settings(
    models: Sequence[DeployedModel], cores: Sequence[int] | None = None
) -> list[list[WorkerSettings]]:
    """The settings of the workers of several models on one machine, for each model one a replica.

    Replicas whose number of cores is given have these alone; all other models share the rest, which the replicas of
    each divide.

    Args:
        models: The models.
        cores: The numbers of the logical CPUs; None: those of this process.

    Raises:
        ConfigError: There are fewer cores than they need.
    """
    cores = sorted(logical_cpus()) if cores is None else cores
    engines = sum(model.replicas for model in models)
    taken = sum(model.replicas * (model.cpus or 0) for model in models)
    rest = cores[taken:]
    if taken > len(cores) or (not rest and any(model.cpus is None for model in models)):
        raise ConfigError(
            f"the models ask for {taken} cores of {len(cores)}, and those without cpus share the rest",
            "Give fewer replicas or cpus.",
        )
    found: list[list[WorkerSettings]] = []
    begin = 0
    for model in models:
        if model.cpus is None:
            own = rest
        else:
            own = cores[begin : begin + model.replicas * model.cpus]
            begin += len(own)
        found.append(replica_settings(model.worker, model.replicas, own, engines))
    return found
