"""Adds ``generate`` to text pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.interfaces import (
    PipelineTokenizer,
    RequestID,
    RequestType,
    TextGenerationContextType,
    TextGenerationInputs,
    TextGenerationOutput,
)
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.generation.coroutines import run_async
from max.pipelines.generation.generation import Generation
from max.pipelines.kv_cache.manager import PagedKVCacheManager

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = lazy_module("asyncio")


@runtime_checkable
class GenerateMixin(Protocol[TextGenerationContextType, RequestType]):
    """Adds :meth:`generate`, which maps requests to their tokens, to a text pipeline."""

    @property
    def kv_managers(self) -> list[PagedKVCacheManager]:
        """The manager of the KV cache, in a list."""
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
        """Frees the resources of a request that has ended; nothing happens if it has none."""
        ...

    def generate(self, prompts: RequestType | list[RequestType]) -> list[TextGenerationOutput]:
        """Generates until all requests have ended.

        Args:
            prompts: One request, or a list of them.

        Returns:
            All tokens of each request, in the order of the requests.
        """
        requests = prompts if isinstance(prompts, list) else [prompts]

        async def contexts() -> list[TextGenerationContextType]:
            return [await self.tokenizer.new_context(request) for request in requests]

        return Generation.of(self).run(run_async(contexts()))

    async def generate_async(self, prompts: RequestType | list[RequestType]) -> Any:
        """Runs :meth:`generate` in another thread.

        Args:
            prompts: One request, or a list of them.
        """
        return await asyncio.to_thread(self.generate, prompts)
