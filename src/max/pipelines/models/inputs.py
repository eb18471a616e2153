"""The inputs and outputs of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.nn.kv_cache.manager import KVCacheInputs
from max.pipelines.sampling.inputs import SamplingInputs


@dataclass(kw_only=True, eq=False, repr=False)
class ModelInputs:
    """The base of a model's inputs.

    A subclass has one attribute per tensor, and may be a dataclass; iteration yields the tensors in the order in which
    the attributes were set.

    Args:
        kv_cache_inputs: The cache's pages and tables.
        lora_ids: The slot of the adapter of each request, int32 ``[batch]``; -1: none.
        lora_ranks: Not used: the memory of adapters has their ranks.
        lora_scales: The scale of the adapter of each request, float32 ``[batch]``.
        sampling: The sampling parameters, for a model that samples in its graph.
    """

    kv_cache_inputs: KVCacheInputs | None = None
    lora_ids: Tensor | None = None
    lora_ranks: Tensor | None = None
    lora_scales: Tensor | None = None
    sampling: SamplingInputs | None = None

    def update(self, **kwargs: object) -> None:
        """Sets attributes.

        Args:
            kwargs: Names and their new values.

        Raises:
            AttributeError: A name is not an attribute of these inputs.
        """
        for name, value in kwargs.items():
            if not hasattr(self, name):
                raise AttributeError(f"{type(self).__name__} has no {name!r}")
            setattr(self, name, value)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The inputs of the model's graph, in graph order.

        Raises:
            NotImplementedError: The subclass does not define them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define buffers")

    def __iter__(self) -> Iterator[Tensor]:
        for value in vars(self).values():
            if isinstance(value, Tensor):
                yield value


class ModelOutputs:
    """The outputs of a model.

    Args:
        logits: Logits of the last token of each request ``[batch, vocab]``, or of more tokens.
        next_token_logits: Logits of the last token of each request, if ``logits`` has more.
        logit_offsets: The offset of each request's rows in ``logits``.
        next_tokens: The sampled tokens ``[batch]``, int64, of a model that samples in its graph.
        hidden_states: Hidden states that the model also returns; not used.
    """

    def __init__(
        self,
        logits: Tensor,
        next_token_logits: Tensor | None = None,
        logit_offsets: Tensor | None = None,
        next_tokens: Tensor | None = None,
        hidden_states: Tensor | None = None,
    ) -> None:
        self.logits = logits
        self.next_token_logits = next_token_logits
        self.logit_offsets = logit_offsets
        self.next_tokens = next_tokens
        self.hidden_states = hidden_states

    logits: Tensor
    next_token_logits: Tensor | None = None
    logit_offsets: Tensor | None = None
    next_tokens: Tensor | None = None
    hidden_states: Tensor | None = None


def ragged_tokens(
    parts: Sequence[npt.NDArray[np.integer[Any]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """The tokens of a batch in one array, and the offset of each request.

    Args:
        parts: The tokens of each request ``[length]``; at least one request.

    Returns:
        Tokens int64 ``[total_seq_len]``, offsets uint32 ``[batch + 1]``.
    """
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.uint32)
    return np.concatenate(parts).astype(np.int64), offsets
