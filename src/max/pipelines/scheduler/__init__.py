"""The scheduler: which requests run in the next step, and who holds the pages. No tensors."""

from __future__ import annotations

from max.pipelines.scheduler.limits import SchedulerLimits
from max.pipelines.scheduler.page_tables import PageSource, PageTables
from max.pipelines.scheduler.scheduler import TextScheduler

__all__ = ["PageSource", "PageTables", "SchedulerLimits", "TextScheduler"]
