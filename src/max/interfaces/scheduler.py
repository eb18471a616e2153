"""Schedulers: batches of requests, and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic

from max.interfaces.pipeline import PipelineOutputType


class Scheduler(ABC):
    """Forms batches of the waiting requests and runs them."""

    @abstractmethod
    def run_iteration(self) -> None:
        """Forms the next batch, runs it, and sends its results."""
        raise NotImplementedError(f"{type(self).__name__} has no run_iteration")


@dataclass
class SchedulerResult(Generic[PipelineOutputType]):
    """A scheduler's report on one request.

    Args:
        is_done: Whether this is the last report.
        result: The pipeline's output; None for a cancelled request.
    """

    is_done: bool
    result: PipelineOutputType | None

    @classmethod
    def cancelled(cls) -> SchedulerResult[PipelineOutputType]:
        """The last report of a cancelled request."""
        return cls(is_done=True, result=None)

    @classmethod
    def create(cls, result: PipelineOutputType) -> SchedulerResult[PipelineOutputType]:
        """The report of an output.

        Args:
            result: The pipeline's output; it states whether the request has ended.
        """
        return cls(is_done=result.is_done, result=result)
