"""Which requests run together in the next step. No tensors."""

from __future__ import annotations

from max.pipelines.scheduler.scheduler import PageSource, SchedulerLimits, TextScheduler

__all__ = ["PageSource", "SchedulerLimits", "TextScheduler"]
