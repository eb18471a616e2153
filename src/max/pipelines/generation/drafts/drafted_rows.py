"""The rows of a step that verify drafted tokens: each is its request after some of them, a chain or a branch of a tree,
and is sampled as it would be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Device, Tensor
from max.interfaces import LogProbabilities, TextGenerationContext
from max.pipelines.core.draft_tree import depths_of, draft_length, right_path
from max.pipelines.core.text_context import TextContext
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.models.inputs import ModelOutputs
from max.pipelines.sampling.log_probabilities import of_rows
from max.pipelines.sampling.sampler import Sampler, needs_sampler
from max.pipelines.structured.constraint import Constraints
from max.pipelines.structured.step_masks import StepMasks

__all__ = ["DraftedRows"]


class _Row:
    """A request as it is after some of its drafted tokens, for the sampler and for masks.

    Args:
        context: The request.
        tokens: The drafted tokens.
        matcher: Its grammar after these; None: it has none.
    """

    def __init__(self, context: TextContext, tokens: Sequence[int], matcher: Any) -> None:
        self.context = context
        self.matcher: Any = matcher
        self.drafted_tokens = tuple(tokens)
        self.generated_tokens = np.append(context.generated_tokens, self.drafted_tokens)
        self.active_idx = self.end_idx = context.active_idx + len(tokens)

    def set_matcher(self, matcher: object) -> None:
        """Sets the matcher, of a mask that could not be computed."""
        self.matcher = matcher

    def get_min_token_logit_mask(self, num_steps: int) -> list[npt.NDArray[np.int32]]:
        """The tokens that are forbidden before the minimum length."""
        count = len(self.drafted_tokens)
        # as if the drafted tokens were steps of one call: the masks of those are dropped
        return self.context.get_min_token_logit_mask(count + num_steps)[count:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)


class DraftedRows:
    """The rows that verify the drafts of a batch. Masks of grammars are computed while the model runs.

    Args:
        batch: The requests; a grammar allows all drafted tokens.
        constraints: Computes the masks.
    """

    def __init__(
        self, batch: Sequence[TextGenerationContext], constraints: Constraints | None
    ) -> None:
        self._batch = batch
        # the one of the last token, and one of each drafted token
        self.counts = [n + 1 if (n := draft_length(context)) else 0 for context in batch]
        self.depths = [
            [0, *depths_of(cast(TextContext, context).draft_parents)] if n else list[int]()
            for context, n in zip(batch, self.counts, strict=True)
        ]
        """The number of drafted tokens before each row of a request, and in it."""
        self._paths: list[list[int]] = [[] for _ in batch]
        drafted = [cast(TextContext, c) for c, n in zip(batch, self.counts, strict=True) if n]
        self._rows: list[_Row] | None = None
        self._masks: StepMasks | None = None
        if any(map(needs_sampler, drafted)) or any(map(_ends_minimum, drafted)):
            self._rows = [row for context in drafted for row in _rows_of(context)]
            if constraints is not None:
                self._masks = constraints.start_masks(cast(Any, self._rows))
        self._chosen: list[list[int]] = []
        self._logits: npt.NDArray[np.float32] = np.zeros((0, 0), np.float32)

    @property
    def all_drafted(self) -> bool:
        """Whether each request of the batch has a draft."""
        return all(self.counts)

    def choose(self, outputs: ModelOutputs, sampler: Sampler, device: Device) -> list[list[int]]:
        """The token that the model chooses after each row, with the seed of its position.

        Args:
            outputs: The outputs of the step.
            sampler: Samples tokens.
            device: The device of the logits.

        Returns:
            The tokens of each request; none without a draft.

        Raises:
            ValueError: The model did not return the logits of the drafted tokens.
        """
        if outputs.logit_offsets is None:
            raise ValueError(
                "drafted tokens are verified by their logits, which the model does not return"
            )
        counts = self.counts
        # [sum of counts, vocab]: the rows of a request are side by side
        tensor, self._logits = outputs.logits, outputs.logits.to(CPU()).to_numpy()
        # most often these are all rows, which are not copied
        if sum(counts) < len(self._logits):
            offsets = outputs.logit_offsets.to(CPU()).to_numpy().astype(np.int64)
            parts = [np.arange(end - n, end) for end, n in zip(offsets[1:], counts, strict=True)]
            self._logits = np.ascontiguousarray(self._logits[np.concatenate(parts)])
            tensor = Tensor.from_numpy(self._logits).to(device)
        if self._rows is None:
            contexts = [c for c, n in zip(self._batch, counts, strict=True) for _ in range(n)]
            steps = [depth for depths in self.depths for depth in depths]
            chosen = sampler.sample_rows(tensor, contexts, steps)
        else:
            bitmask = None if self._masks is None else self._masks.result()
            chosen = sampler.sample(tensor, cast(Any, self._rows), 0, bitmask)
        tokens = iter(chosen.to(CPU()).to_numpy().tolist())
        self._chosen = [[next(tokens) for _ in range(count)] for count in counts]
        return self._chosen

    def accept(self, row: int) -> list[int]:
        """Finds which drafted tokens of a request are those that the model chooses. If its grammar cannot be followed
        after these, the request gets the matcher that says so.

        Args:
            row: The request's place in the batch.

        Returns:
            The indices of the right ones among its drafted tokens, in order.
        """
        context = cast(TextContext, self._batch[row])
        right = right_path(context.draft_tokens, context.draft_parents, self._chosen[row])
        # the row of the last token, then those of the right ones
        self._paths[row] = path = [0, *(index + 1 for index in right)]
        begin = sum(self.counts[:row])
        for own in [] if self._rows is None else [self._rows[begin + place] for place in path]:
            matcher = own.matcher
            if matcher is not None and matcher.is_error():
                context.set_matcher(matcher)
                break
        return right

    def keep_branches(self, cache: PagedKVCacheManager) -> None:
        """Moves the keys and values of right tokens to the places behind the certain ones, which those of a chain have.

        Args:
            cache: The cache.
        """
        for context, path in zip(self._batch, self._paths, strict=True):
            if path:
                tokens = [place - 1 for place in path[1:]]
                cache.keep_branch(context.request_id, context.active_idx, tokens)

    def tokens(self, row: int) -> list[int]:
        """The new tokens of a request: those of its draft that are right, and the one after them.

        Args:
            row: The request's place in the batch.
        """
        return [self._chosen[row][place] for place in self._paths[row]]

    def log_probabilities(self, row: int, count: int) -> list[LogProbabilities | None]:
        """The log-probabilities of the new tokens of a request.

        Args:
            row: The request's place in the batch.
            count: The number of new tokens.
        """
        context = self._batch[row]
        begin, path, chosen = sum(self.counts[:row]), self._paths[row], self.tokens(row)
        if not context.log_probabilities:
            return [None] * count
        logged = getattr(context, "logged_tokens", ())
        return [
            of_rows(
                self._logits[begin + path[step] : begin + path[step] + 1],
                chosen[step : step + 1],
                context.log_probabilities,
                logged,
            )
            for step in range(count)
        ]


def _ends_minimum(context: TextContext) -> bool:
    """Whether some rows of a request may end it, and others not."""
    return len(context.generated_tokens) < context.min_tokens


def _rows_of(context: TextContext) -> list[_Row]:
    """The rows of a request: of its last token, and of each drafted one."""
    rows = [_Row(context, (), context.matcher)]
    for token, parent in zip(context.draft_tokens, context.draft_parents, strict=True):
        before = rows[parent + 1]
        matcher = before.matcher
        if matcher is not None:
            # rows of several branches follow the same one
            matcher = matcher.deep_copy()
            matcher.consume_token(token)
        rows.append(_Row(context, (*before.drafted_tokens, token), matcher))
    return rows
