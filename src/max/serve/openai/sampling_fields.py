"""The fields of requests for sampling, with the names that llama.cpp and Ollama share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from max.interfaces import SamplingParamsInput
from max.serve.openai.fields import CacheSalt, StrictBody


class LlamaSamplingFields(StrictBody):
    """How tokens are chosen."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: int | None = None
    cache_salt: CacheSalt | None = None

    def sampling_with(self, most_tokens: int | None) -> SamplingParamsInput:
        """The sampling parameters that are set.

        Args:
            most_tokens: The maximum number of tokens to generate; None, 0 and less: no limit.
        """
        return SamplingParamsInput(
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            temperature=self.temperature,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repeat_penalty,
            max_new_tokens=most_tokens if most_tokens is not None and most_tokens > 0 else None,
            seed=None if self.seed is None else self.seed % 2**64,
        )
