"""Embeddings of texts: requests' state, batches, results."""

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
        """Their number."""
        ...

    @property
    def model_name(self) -> str:
        """The model that was asked for."""
        ...


@dataclass(frozen=True)
class EmbeddingsGenerationInputs(PipelineInputs):
    """A batch of requests for embeddings.

    Args:
        batches: One dictionary a replica of the model.
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
        embeddings: The vector (or one a token, where the model does not pool).
    """

    embeddings: npt.NDArray[np.floating[Any]]

    @property
    def is_done(self) -> bool:
        """True: an embedding takes one step."""
        return True
