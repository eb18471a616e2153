"""Adds ``generate`` to pipelines of text."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from max.interfaces import (
    PipelineTokenizer,
    RequestID,
    RequestType,
    TextGenerationContextType,
    TextGenerationInputs,
    TextGenerationOutput,
)
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.generation.generation import Generation, run_async
from max.pipelines.kv_cache.manager import PagedKVCacheManager


@runtime_checkable
class GenerateMixin(Protocol[TextGenerationContextType, RequestType]):
    """Adds :meth:`generate` to a pipeline of text: requests in, texts' tokens out."""

    @property
    def kv_managers(self) -> list[PagedKVCacheManager]:
        """The managers of the pipeline's caches."""
        ...

    @property
    def pipeline_config(self) -> PipelineConfig:
        """The pipeline's configuration."""
        ...

    @property
    def tokenizer(
        self,
    ) -> PipelineTokenizer[TextGenerationContextType, npt.NDArray[np.integer[Any]], RequestType]:
        """The pipeline's tokenizer."""
        ...

    def execute(
        self, inputs: TextGenerationInputs[TextGenerationContextType]
    ) -> dict[RequestID, TextGenerationOutput]:
        """Runs a batch.

        Args:
            inputs: The batch.
        """
        ...

    def release(self, request_id: RequestID) -> None:
        """Frees what a request holds.

        Args:
            request_id: The request.
        """
        ...

    def generate(self, prompts: RequestType | list[RequestType]) -> list[TextGenerationOutput]:
        """Generates for requests until all of them have ended.

        Args:
            prompts: One request, or a list of them.

        Returns:
            For each request, in their order, all its tokens.
        """
        requests = prompts if isinstance(prompts, list) else [prompts]

        async def contexts() -> list[TextGenerationContextType]:
            return [await self.tokenizer.new_context(request) for request in requests]

        return Generation.of(self).run(run_async(contexts()))

    async def generate_async(self, prompts: RequestType | list[RequestType]) -> Any:
        """As :meth:`generate`, in a thread, so that the event loop goes on.

        Args:
            prompts: One request, or a list of them.
        """
        return await asyncio.to_thread(self.generate, prompts)
