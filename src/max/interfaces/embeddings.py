"""Embeddings of texts: requests' states, batches, results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from max.interfaces.context import BaseContext
from max.interfaces.pipeline import PipelineInputs
from max.interfaces.request import RequestID


@runtime_checkable
class EmbeddingsContext(BaseContext, Protocol):
    """The state of one request for an embedding: tokens in, one vector out, in one step."""

    @property
    def tokens(self) -> npt.NDArray[np.integer[Any]]:
        """The tokens of the text."""
        ...

    @property
    def active_length(self) -> int:
        """The number of tokens."""
        ...

    @property
    def model_name(self) -> str:
        """The name of the requested model."""
        ...


@dataclass(frozen=True)
class EmbeddingsGenerationInputs(PipelineInputs):
    """A batch of requests for embeddings.

    Args:
        batches: One dictionary per replica of the model.
    """

    batches: list[dict[RequestID, EmbeddingsContext]]

    @property
    def batch(self) -> dict[RequestID, EmbeddingsContext]:
        """The requests of all replicas."""
        return {key: context for batch in self.batches for key, context in batch.items()}


@dataclass(frozen=True)
class EmbeddingsGenerationOutput:
    """The embedding of one text.

    Args:
        embeddings: The vector; one vector per token if the model does not pool.
    """

    embeddings: npt.NDArray[np.floating[Any]]

    @property
    def is_done(self) -> bool:
        """True: an embedding takes one step."""
        return True
