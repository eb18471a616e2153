"""The scheduler: chooses the requests of the next step, and reserves their pages. No tensors."""

from __future__ import annotations

from max.pipelines.scheduler.limits import SchedulerLimits
from max.pipelines.scheduler.replicas import ReplicaScheduler, scheduler_of
from max.pipelines.scheduler.scheduler import TextScheduler

__all__ = ["ReplicaScheduler", "SchedulerLimits", "TextScheduler", "scheduler_of"]
