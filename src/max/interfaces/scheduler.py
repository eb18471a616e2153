"""The scheduler's side of a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic

from max.interfaces.pipeline import PipelineOutputType


class Scheduler(ABC):
    """Makes batches out of the waiting requests and runs them."""

    @abstractmethod
    def run_iteration(self) -> None:
        """Makes the next batch, runs it, and hands out its results."""
        raise NotImplementedError(f"{type(self).__name__} has no run_iteration")


@dataclass
class SchedulerResult(Generic[PipelineOutputType]):
    """What a scheduler reports of one request.

    Args:
        is_done: Whether this is the last report.
        result: What the pipeline made; None for a request that was cancelled.
    """

    is_done: bool
    result: PipelineOutputType | None

    @classmethod
    def cancelled(cls) -> SchedulerResult[PipelineOutputType]:
        """The report of a request that was cancelled; it is the last."""
        return cls(is_done=True, result=None)

    @classmethod
    def create(cls, result: PipelineOutputType) -> SchedulerResult[PipelineOutputType]:
        """The report of a result.

        Args:
            result: What the pipeline made; it tells whether the request has ended.
        """
        return cls(is_done=result.is_done, result=result)
