"""The scheduler: chooses the requests of the next step, and owns their page tables. No tensors."""

from __future__ import annotations

from max.pipelines.scheduler.limits import SchedulerLimits
from max.pipelines.scheduler.page_tables import PageSource, PageTables
from max.pipelines.scheduler.scheduler import TextScheduler

__all__ = ["PageSource", "PageTables", "SchedulerLimits", "TextScheduler"]
