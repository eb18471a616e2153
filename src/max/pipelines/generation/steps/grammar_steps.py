"""Calls of decoding steps of batches with grammars, sampled under masks on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from max._lazy import lazy_module
from max.interfaces import TextGenerationContext
from max.pipelines.generation.steps.decode_loop import DecodeLoop, TokenTables
from max.pipelines.generation.steps.step_tokens import jumps_ahead, reasoning_limit
from max.pipelines.sampling.sampler import changes_logits
from max.pipelines.structured.constraint import Constraints
from max.pipelines.structured.kept_tokens import KeptTokens

if TYPE_CHECKING:
    from max.pipelines.structured import call_masks
else:
    call_masks = lazy_module("max.pipelines.structured.call_masks")

__all__ = ["GrammarSteps"]


class _Memory(NamedTuple):
    """The tables of a batch, for the loop and for the thread that writes them."""

    tables: TokenTables
    memory: call_masks.CallMemory


class GrammarSteps:
    """Plans the calls of batches with grammars.

    Args:
        constraints: The grammars of requests.
        loop: Runs the calls.
        vocabulary: The number of logits of a token.
    """

    def __init__(self, constraints: Constraints, loop: DecodeLoop, vocabulary: int) -> None:
        self._constraints, self._loop, self._vocabulary = constraints, loop, vocabulary
        self._kept = KeptTokens(constraints.ordinary_tokens, vocabulary)
        self._memory: dict[int, _Memory] = {}
        """The last one used, by the size of the batch."""

    def plan(
        self, batch: Sequence[TextGenerationContext], steps: int
    ) -> tuple[TokenTables, call_masks.CallMasks | call_masks.ReadyMasks] | None:
        """The tables and masks of a call of a decoding batch; None if a request needs another way.

        Args:
            batch: The requests, each with one new token.
            steps: The maximum number of steps.
        """
        if not all(map(_is_plain, batch)) or all(c.matcher is None for c in batch):
            return None
        if (own := self._memory.get(len(batch))) is None:
            tables, allowed, kept = self._loop.token_tables(len(batch), self._vocabulary)
            words = max(self._constraints.words(), 1)
            own = _Memory(tables, call_masks.CallMemory(allowed, kept, words))
            # of one size only: [batch, vocab] takes memory
            self._memory = {len(batch): own}
        jumps = list(map(jumps_ahead, batch))
        masks = self._constraints.call_masks(batch, jumps, own.memory, self._kept, steps)
        return own.tables, masks


def _is_plain(context: TextGenerationContext) -> bool:
    """Whether the next step of a request gives one token, by its grammar, the model's logits and nothing else."""
    return (
        context.active_length == 1  # more with a draft
        and context.active_idx == context.end_idx
        and not context.log_probabilities
        and not changes_logits(context)
        and reasoning_limit(context) is None
    )
