"""The inputs of a step that the next step of the same batch updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max._dataclass import dataclass
from max.driver import Tensor
from max.pipelines.models.inputs import ModelInputs

__all__ = ["ReusableInputs"]


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

    def precedes(self, batch: Sequence[Any]) -> bool:
        """Whether a batch has the same requests, each advanced by one token."""
        # the same objects: a request that ended and came again has another context
        return len(batch) == len(self.batch) and all(
            context is previous and context.active_idx == end and context.start_idx == end - 1
            for context, previous, end in zip(batch, self.batch, self.ends, strict=True)
        )
