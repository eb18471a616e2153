"""The last step of a pipeline; a next step with the same batch updates its inputs in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max._dataclass import dataclass
from max.driver import Tensor
from max.pipelines.models.inputs import ModelInputs

__all__ = ["LastStep"]


@dataclass
class LastStep:
    """The inputs and tokens of the last step; the next one updates them in place if the batch is the same.

    Args:
        batch: The requests.
        ends: For each request its ``active_idx`` in the next step; -1 after a chunk of a prompt.
        inputs: The inputs.
        tokens: The tokens that were chosen.
    """

    batch: list[Any]
    ends: list[int]
    inputs: ModelInputs
    tokens: Tensor

    @classmethod
    def of(cls, batch: list[Any], inputs: ModelInputs, tokens: Tensor, steps: int = 1) -> LastStep:
        """Records the last of `steps` steps, before their tokens are added to the contexts."""
        ends = [c.active_idx + steps if c.active_idx == c.end_idx else -1 for c in batch]
        return cls(batch, ends, inputs, tokens)

    def precedes(self, batch: Sequence[Any]) -> bool:
        """Whether a batch has the same requests, each one token further."""
        return len(batch) == len(self.batch) and all(
            context is previous and context.active_idx == end and context.start_idx == end - 1
            for context, previous, end in zip(batch, self.batch, self.ends, strict=True)
        )
