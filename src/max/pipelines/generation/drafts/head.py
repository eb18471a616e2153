"""Drafts by a head that the checkpoint brings, which reads the hidden states that the model stored in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from max.driver import CPU
from max.interfaces import RequestID, SamplingParams, TextGenerationContext
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import BatchDrafter
from max.pipelines.generation.steps.decode_loop import DecodeLoop
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.models.inputs import ModelInputs
from max.pipelines.models.pipeline_model import PipelineModel
from max.pipelines.sampling.inputs import SEED_MASK, SEED_STEP, SamplingInputs

__all__ = ["HeadDrafter"]


class _Text:
    """What a head has read of a request.

    Args:
        context: The request.
        opening: What tells its page table from an earlier one.
        read: The number of places whose keys the head has computed from the model's states.
    """

    def __init__(self, context: TextContext, opening: int, read: int) -> None:
        params = context.sampling_params
        self.opening, self.read = opening, read
        # place i is of token i + 1: with this seed the head samples as the model does for the same token
        self.params = SamplingParams(
            top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
            temperature=params.temperature, seed=(params.seed + SEED_STEP) & SEED_MASK,
            ignore_eos=True,
        )  # fmt: skip


class _Row:
    """A request as a step of the head reads it: a text whose token ``i`` is token ``i + 1`` of the request.

    Args:
        context: The request.
        text: What the head has read of it.
        end: The number of places that it has read after the step.
    """

    eos_token_ids = frozenset[int]()

    def __init__(self, context: TextContext, text: _Text, end: int) -> None:
        self.request_id, self.sampling_params = context.request_id, text.params
        self.start_idx, self.active_idx = text.read, end
        self.active_length = end - text.read
        self.next_tokens = context.all_tokens[text.read + 1 : end + 1]

    def advance(self, token: int, steps: int = 1) -> None:
        """Goes on to the step that reads the last written token.

        Args:
            token: The token.
            steps: The number of steps that have run.
        """
        self.start_idx = self.active_idx + steps - 1
        self.active_idx = self.start_idx + 1
        self.active_length, self.next_tokens = 1, np.array([token], np.int64)


class HeadDrafter(BatchDrafter):
    """Lets a head write the next tokens.

    The head's keys are in the pages of the model, and go with them: prefixes that requests share have them, too. It
    reads what it has not read yet when it drafts, and the prompts of requests chunk by chunk.

    Args:
        head: The head; its inputs are those of the model.
        cache: The cache of the model.
        loop: Runs several of its steps; None: they run one by one.
        chunk: The maximum number of tokens of a request that a step reads.
    """

    takes_steps = True

    def __init__(
        self,
        head: PipelineModel[Any],
        cache: PagedKVCacheManager,
        loop: DecodeLoop | None,
        chunk: int,
    ) -> None:
        self._head, self._cache, self._loop, self._chunk = head, cache, loop, chunk
        self._texts: dict[RequestID, _Text] = {}

    def propose_all(
        self, contexts: Sequence[TextContext], most: Sequence[int]
    ) -> list[Sequence[int]]:
        """The tokens that the head writes, for all requests in the same steps.

        Args:
            contexts: The requests.
            most: The maximum number of tokens of each.
        """
        drafts: list[Sequence[int]] = [()] * len(contexts)
        kept = [row for row, context in enumerate(contexts) if self._has_room(context, most[row])]
        own = [contexts[row] for row in kept]
        if not own:
            return drafts
        ends = [self._end(context) for context in own]
        self._read(own, ends, leave=1)
        texts = [_Row(c, self._text(c), end) for c, end in zip(own, ends, strict=True)]
        written = [[token] for token in self._step(texts)]
        for context, end, row, tokens in zip(own, ends, texts, written, strict=True):
            self._text(context).read = end
            row.advance(tokens[0])
        # requests with shorter drafts take no part in later steps, as they have no pages for these
        left, done = range(len(own)), 1
        # negative: the logits were all NaN, so nothing follows
        while left := [n for n in left if most[kept[n]] > done and written[n][-1] >= 0]:
            steps = min(most[kept[n]] for n in left) - done
            more = self._steps([texts[n] for n in left], steps)
            for n, tokens in zip(left, more, strict=True):
                written[n] += tokens
            done += steps
            if len(more[0]) < steps:
                break
        for row, tokens in zip(kept, written, strict=True):
            # logits that are all NaN give no token
            count = next((n for n, token in enumerate(tokens) if token < 0), len(tokens))
            drafts[row] = tokens[:count]
        return drafts

    def read(self, contexts: Sequence[TextContext]) -> None:
        """Lets the head read the chunks of prompts that the model has read.

        Args:
            contexts: The requests.
        """
        self._read(contexts, [context.start_idx for context in contexts])

    def observe(self, context: TextContext, right_tokens: Sequence[int], more: int = 0) -> None:
        """Does nothing: keys of drafted tokens do not count as read, and the model has written its own states."""

    def rewind(self, context: TextContext) -> None:
        """Lets the head read the answer of a request again, whose tokens may be others now.

        Args:
            context: The request.
        """
        text = self._texts.get(context.request_id)
        if text is not None:
            # place i needs token i + 1, and that after the prompt may be another one
            text.read = min(text.read, len(context.prompt_tokens) - 1)

    def forget(self, request_id: RequestID) -> None:
        """Forgets a request that has ended."""
        self._texts.pop(request_id, None)

    def _text(self, context: TextContext) -> _Text:
        """What the head has read of a request: of one with a new page table, what its first pages have."""
        number, prefix = self._cache.pages.opening(context.request_id)
        text = self._texts.get(context.request_id)
        if text is None or text.opening != number:
            # the last one of these places is of the token after the prefix, which differs
            text = _Text(context, number, max(prefix - 1, 0))
            self._texts[context.request_id] = text
        return text

    def _end(self, context: TextContext) -> int:
        """The number of first tokens whose states the model has stored: with those of the last step that the next one
        reads again.
        """
        slots = self._cache.slots
        return context.start_idx + (0 if slots is None else slots.behind(context.request_id))

    def _has_room(self, context: TextContext, most: int) -> bool:
        """Reserves the pages of a draft, which the step that verifies it needs too; False if there are none."""
        try:
            self._cache.pages.reserve(context.request_id, context.active_idx + most)
        except OutOfPagesError:
            return False
        return True

    def _read(self, contexts: Sequence[TextContext], ends: Sequence[int], leave: int = 0) -> None:
        """Reads chunk by chunk what is left of requests.

        Args:
            contexts: The requests.
            ends: The number of places of each.
            leave: How much of each is left for a further step, at least: 1 if its logits are needed.
        """
        while behind := [
            (text, _Row(context, text, min(end - leave, text.read + self._chunk)))
            for context, end in zip(contexts, ends, strict=True)
            if (text := self._text(context)).read + (self._chunk if leave else 0) < end
        ]:
            self._step([row for _, row in behind], goes_on=False)
            for text, row in behind:
                text.read = row.active_idx

    def _step(self, rows: Sequence[_Row], goes_on: bool = True) -> list[int]:
        """Runs a step, after which another one may follow; returns the next token of each row."""
        batch = cast(Sequence[TextGenerationContext], rows)
        tokens = self._head.execute(self._inputs(batch, goes_on)).next_tokens
        assert tokens is not None  # the head samples in its graph
        return tokens.to(CPU()).to_numpy().tolist()

    def _inputs(self, batch: Sequence[TextGenerationContext], goes_on: bool = True) -> ModelInputs:
        """The inputs of a step."""
        head, cache = self._head, self._cache.get_runtime_inputs(batch)
        inputs = head.prepare_initial_token_inputs(batch, cache, int(goes_on))
        inputs.update(sampling=SamplingInputs.of(batch, head.devices[0]))
        return inputs

    def _steps(self, rows: Sequence[_Row], steps: int) -> list[list[int]]:
        """Runs steps after the first one; returns the tokens of each row, fewer if the loop has ended early."""
        batch, loop = cast(Sequence[TextGenerationContext], rows), self._loop
        if steps > 1 and loop is not None and loop.usable:
            # history: [steps, rows]
            written = loop.run(self._inputs(batch), batch, steps).history.T.tolist()
            for row, own in zip(rows, written, strict=True):
                row.advance(own[-1], len(own))
            return written
        written: list[list[int]] = [[] for _ in rows]
        while len(written[0]) < steps:
            for row, own, token in zip(rows, written, self._step(rows), strict=True):
                own.append(token)
                row.advance(token)
            if min(own[-1] for own in written) < 0:
                break
        return written
