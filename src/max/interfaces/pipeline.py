"""Pipelines: they map a batch of requests to one output per request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from max.interfaces.request import RequestID


class PipelineInputs:
    """The base of a pipeline's inputs."""


@runtime_checkable
class PipelineOutput(Protocol):
    """The output of a pipeline for one request."""

    @property
    def is_done(self) -> bool:
        """Whether the request has ended."""
        ...


PipelineInputsType = TypeVar("PipelineInputsType", bound=PipelineInputs)
PipelineOutputType = TypeVar("PipelineOutputType", bound=PipelineOutput)
PipelineOutputsDict: TypeAlias = dict[RequestID, PipelineOutputType]


class Pipeline(Generic[PipelineInputsType, PipelineOutputType], ABC):
    """The base of all pipelines."""

    @abstractmethod
    def execute(self, inputs: PipelineInputsType) -> dict[RequestID, PipelineOutputType]:
        """Runs a batch.

        Args:
            inputs: The batch.

        Returns:
            The outputs by request.
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    @abstractmethod
    def release(self, request_id: RequestID) -> None:
        """Frees the resources of a request, for example its pages of the KV cache.

        Args:
            request_id: The identifier of a request that has ended or is abandoned.
        """
        raise NotImplementedError(f"{type(self).__name__} has no release")


PipelinesFactory: TypeAlias = Callable[[], Pipeline[Any, Any]]
"""A function that makes a pipeline; it runs in the process of the pipeline."""
