"""The inputs of a step that a later step of the same batch updates in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from max._dataclass import dataclass
from max.driver import Device, Tensor
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.models.inputs import ModelInputs
from max.pipelines.sampling.inputs import SamplingInputs

__all__ = ["BatchInputs", "ReusableInputs", "has_same_requests"]


def has_same_requests(batch: Sequence[Any], last: Sequence[Any]) -> bool:
    """Whether two batches have the same requests in the same order.

    Args:
        batch: The contexts of one.
        last: Those of the other.
    """
    # the same objects: a request that ended and came again has another context
    return len(batch) == len(last) and all(map(operator.is_, batch, last))


class BatchInputs:
    """The inputs of a batch that do not depend on the number of its new tokens: those of the last one, updated in
    place, if it had the same requests.

    Args:
        cache: The cache of the model.
        device: Where it samples.
    """

    def __init__(self, cache: PagedKVCacheManager, device: Device) -> None:
        self._cache, self._device = cache, device
        self._last: list[Any] = []
        self._cache_inputs: RaggedKVCacheInputs | None = None
        self._sampling: SamplingInputs | None = None

    def _begin(self, batch: Sequence[Any]) -> None:
        """Forgets the inputs of another batch."""
        if not has_same_requests(batch, self._last):
            self._last = list(batch)
            self._cache_inputs = self._sampling = None

    def of_cache(self, batch: Sequence[Any], num_steps: int) -> RaggedKVCacheInputs:
        """The inputs of the cache.

        Args:
            batch: The requests; their pages are reserved.
            num_steps: The number of steps that run without new inputs.
        """
        self._begin(batch)
        if num_steps > 1:
            return self._cache.get_runtime_inputs(batch, num_steps)
        last = self._cache_inputs
        made = (
            self._cache.get_runtime_inputs(batch)
            if last is None
            else self._cache.advance(last, batch)
        )
        self._cache_inputs = made
        return made

    def of_sampling(self, batch: Sequence[Any], step: int = 0) -> SamplingInputs:
        """The sampling parameters of the next token of each request.

        Args:
            batch: The requests.
            step: The number of the step, in an execution of several.
        """
        self._begin(batch)
        last = self._sampling
        if last is None:
            self._sampling = SamplingInputs.of(batch, self._device, step)
        else:
            self._sampling = last.advance(batch, step)
        return self._sampling


@dataclass
class ReusableInputs:
    """The inputs and tokens of a step; the next step updates them in place if its batch is the same.

    Args:
        batch: The requests.
        ends: The ``active_idx`` of each request in the next step; -1 after a chunk of a prompt.
        inputs: The inputs.
        tokens: The chosen tokens ``[batch]``.
    """

    batch: list[Any]
    ends: list[int]
    inputs: ModelInputs
    tokens: Tensor

    @classmethod
    def of(
        cls, batch: list[Any], inputs: ModelInputs, tokens: Tensor, steps: int = 1
    ) -> ReusableInputs:
        """Records those of the last of `steps` steps, before its tokens are added to the contexts."""
        # -1 fits no later step: a prompt's chunk is followed by another chunk
        ends = [c.active_idx + steps if c.active_idx == c.end_idx else -1 for c in batch]
        return cls(batch, ends, inputs, tokens)

    def fits(self, batch: Sequence[Any]) -> bool:
        """Whether a batch has the same requests, each with one new token, which need not be the chosen one."""
        return len(batch) == len(self.batch) and all(
            context is previous
            and end >= 0
            and context.active_length == 1
            and context.active_idx == context.end_idx
            for context, previous, end in zip(batch, self.batch, self.ends, strict=True)
        )

    def precedes(self, batch: Sequence[Any]) -> bool:
        """Whether a batch has the same requests, each advanced by one token."""
        # the same objects: a request that ended and came again has another context
        return len(batch) == len(self.batch) and all(
            context is previous and context.active_idx == end and context.start_idx == end - 1
            for context, previous, end in zip(batch, self.batch, self.ends, strict=True)
        )
