"""Drafts by a smaller model, which has its own cache of pages and follows the texts of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from max.driver import Tensor
from max.interfaces import (
    RequestID,
    SamplingParams,
    TextGenerationInputs,
    TextGenerationOutput,
)
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import BatchDrafter
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.saved_states import restore_state, save_state

__all__ = ["DraftModel", "DraftedText", "ModelDrafter"]


@dataclass(kw_only=True)
class DraftedText(TextContext):
    """The text of a request as the draft model has it: drafted tokens are no answer, and all of them may be removed."""

    def to_generation_output(self) -> TextGenerationOutput:
        """No tokens: those that were returned could not be removed."""
        return TextGenerationOutput(
            request_id=self.request_id, tokens=[], final_status=self.status, log_probabilities=None
        )

    @classmethod
    def of(cls, context: TextContext, longest: int) -> DraftedText:
        """The text of a request, to be read from its start.

        Args:
            context: The request; penalties and processors of its logits are left to the model that verifies.
            longest: The number of tokens of the longest text of the draft model.
        """
        params = context.sampling_params
        return cls(
            tokens=context.all_tokens,
            max_length=longest,
            request_id=context.request_id,
            cache_salt=context.cache_salt,
            adapter=context.adapter,
            # the same seed: where both models have equal distributions, they choose equal tokens
            sampling_params=SamplingParams(
                top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
                temperature=params.temperature, seed=params.seed,
            ),
        )  # fmt: skip

    def common_length(self, context: TextContext) -> int:
        """The number of first tokens that the text and a request have in common.

        Args:
            context: The request.
        """
        own, tokens = self.all_tokens, context.all_tokens
        length = min(len(own), len(tokens))
        (different,) = (own[:length] != tokens[:length]).nonzero()
        return int(different[0]) if different.size else length

    def follow(self, context: TextContext) -> int | None:
        """Makes the text that of the request: removes wrong tokens, and appends those that it lacks.

        Args:
            context: The request.

        Returns:
            The number of tokens that both had; None if tokens would be removed that are no draft.
        """
        self.set_token_indices(active_idx=self.end_idx)  # it may be at a chunk of the prompt
        common = self.common_length(context)
        # the prompt itself has changed: nothing of the text is left
        if common < len(self.prompt_tokens):
            return None
        self.truncate(common)
        for token in context.all_tokens[common:].tolist():
            self.jump_ahead(token)
        return common


class DraftModel(Protocol):
    """What a drafter needs of the pipeline of the draft model."""

    @property
    def kv_manager(self) -> RequestPages:
        """Its cache."""
        ...

    @property
    def vocabulary(self) -> int:
        """The number of its tokens."""
        ...

    @property
    def longest(self) -> int:
        """The number of tokens of the longest text."""
        ...

    @property
    def states(self) -> Sequence[Tensor]:
        """Its recurrent states ``[slots, layers, …]``; empty: it has none."""
        ...

    def execute(self, inputs: TextGenerationInputs[TextContext]) -> object:
        """Runs a batch; tokens that are not certain stay out of the cached prefixes."""
        ...


class ModelDrafter(BatchDrafter):
    """Lets a smaller model write the next tokens.

    The draft model reads prompts beside the model, chunk by chunk, and reuses the prefixes in its own cache. After
    wrong tokens it goes back to the last right one. If its pages run out, requests that are not in the batch lose
    theirs, and are read again later; a request that still has no room is not drafted.

    Args:
        model: The draft model.
        vocabulary: The number of the model's tokens; drafts have no others.
        chunk: The maximum number of tokens of a request that a step reads.
    """

    takes_steps = True

    def __init__(self, model: DraftModel, vocabulary: int, chunk: int) -> None:
        self._model, self._chunk = model, chunk
        self.vocabulary = vocabulary
        """The number of the model's tokens."""
        # the least recently drafted one first
        self._texts: dict[RequestID, DraftedText] = {}
        self._saved: dict[RequestID, int] = {}
        """The numbers of tokens of the recurrent states that were saved before uncertain tokens."""
        self._stepped: set[RequestID] = set()
        """The texts whose states a caller's own steps have changed."""

    def propose_all(
        self, contexts: Sequence[TextContext], most: Sequence[int]
    ) -> list[Sequence[int]]:
        """The tokens that the draft model writes, for all requests in the same steps.

        Args:
            contexts: The requests.
            most: The maximum number of tokens of each.
        """
        texts = self._texts_of(contexts, [context.current_length for context in contexts], most)
        steps = max((most[row] for row in texts), default=0)
        # first those that lack tokens: the others have one to read, as all have after it
        behind = {row: text for row, text in texts.items() if text.active_length > 1}
        self._run([*behind.values()], 1)
        level = [text for row, text in texts.items() if row not in behind]
        if self._model.states:
            # after the tokens that are certain
            self._run(level, 1)
            saved = [text for text in texts.values() if steps > 1 and self._save(text)]
            self._run(saved, steps - 1)
        elif behind and level:
            self._run(level, 1)
            self._run([*texts.values()], steps - 1)
        else:
            # those that were behind have run one of the steps
            self._run([*texts.values()], steps - bool(behind))
        drafts: list[Sequence[int]] = [()] * len(contexts)
        for row, text in texts.items():
            # shorter drafts than those of others were written as well, and are cut
            drafted = text.all_tokens[contexts[row].current_length :][: most[row]].tolist()
            # a draft model may have more tokens, as padding, which the model has no logits of
            known = next((n for n, token in enumerate(drafted) if token >= self.vocabulary), None)
            drafts[row] = drafted[:known]
        return drafts

    def texts(self, contexts: Sequence[TextContext], steps: int) -> list[DraftedText]:
        """The texts of requests as the draft model has them, with pages for some steps.

        Args:
            contexts: The requests.
            steps: The number of steps.

        Raises:
            OutOfPagesError: A request has no room.
        """
        lengths = [context.current_length for context in contexts]
        texts = self._texts_of(contexts, lengths, [steps] * len(contexts))
        # the caller's steps change the states
        saved = not self._model.states or all([self._save(text) for text in texts.values()])
        self._stepped.update(self._saved.keys() & {text.request_id for text in texts.values()})
        if len(texts) < len(contexts) or not saved:
            cache = self._model.kv_manager
            raise OutOfPagesError(1, cache.free_pages, cache.total_num_pages)
        return [*texts.values()]

    def read(self, contexts: Sequence[TextContext]) -> None:
        """Lets the draft model read the chunks of prompts that the model has read.

        Args:
            contexts: The requests.
        """
        self._texts_of(contexts, [context.start_idx for context in contexts], [1] * len(contexts))

    @property
    def draft_vocabulary(self) -> int:
        """The number of the draft model's tokens."""
        return self._model.vocabulary

    def written_text(self, context: TextContext, length: int) -> DraftedText | None:
        """The text of a request with the first tokens of its draft, of which the draft model has read all but the last;
        None: it has another text.

        Args:
            context: The request.
            length: The number of drafted tokens.
        """
        text, own = self._texts.get(context.request_id), context.current_length
        if text is None or text.start_idx < own + length - 1 or text.end_idx < own + length:
            return None
        drafted = tuple(text.all_tokens[own : own + length].tolist())
        if drafted != context.draft_tokens[:length] or text.common_length(context) < own:
            return None
        return text

    def follow_rounds(self, context: TextContext, tokens: Sequence[int], unread: int) -> None:
        """Takes over the tokens of rounds that ran without this drafter, in which the draft model has read them.

        Args:
            context: The request, before these tokens; `written_text` gave its text.
            tokens: The tokens.
            unread: How many of the last ones it has not read.
        """
        text = self._texts[context.request_id]
        text.set_token_indices(active_idx=text.end_idx)
        text.truncate(context.current_length)
        for token in tokens:
            text.jump_ahead(token)
        text.set_token_indices(start_idx=text.end_idx - unread)
        # these tokens are certain, so that other requests may reuse their pages
        self._model.kv_manager.step(text)

    def observe(self, context: TextContext, right_tokens: Sequence[int], more: int = 0) -> None:
        """Does nothing: the next draft compares the texts."""

    def rewind(self, context: TextContext) -> None:
        """Does nothing: the next draft compares the texts.

        Args:
            context: The request.
        """

    def forget(self, request_id: RequestID) -> None:
        """Frees the pages of a request that has ended."""
        if self._texts.pop(request_id, None) is not None:
            self._close(request_id)

    def _close(self, request_id: RequestID) -> None:
        """Frees the pages and the states of a text."""
        self._saved.pop(request_id, None)
        self._stepped.discard(request_id)
        self._model.kv_manager.close(request_id)

    def _save(self, text: DraftedText) -> bool:
        """Saves the recurrent state of a text whose processed tokens are certain; False if there is no room."""
        slots = self._model.kv_manager.slots
        assert slots is not None
        try:
            save_state(slots, self._model.states, text.request_id)
        except OutOfPagesError:
            return False
        self._saved[text.request_id] = text.start_idx
        return True

    def _certain(self, text: DraftedText, num_processed: int, num_right: int) -> int | None:
        """How many of the processed tokens of a text its state keeps; None: it cannot go back that far.

        Args:
            text: The text.
            num_processed: The number of its processed tokens.
            num_right: The number of those that are right.
        """
        slots, key = self._model.kv_manager.slots, text.request_id
        if slots is None:
            return min(num_processed, num_right)
        saved, used = self._saved.pop(key, None), text.request_id in self._stepped
        self._stepped.discard(key)
        if num_processed <= num_right and not used:
            slots.keep(key)
            return num_processed
        if saved is None or saved > num_right:
            return None
        if used:
            restore_state(slots, self._model.states, key)
        else:
            slots.rewind(key, 0)
        return saved

    def _texts_of(
        self, contexts: Sequence[TextContext], lengths: Sequence[int], steps: Sequence[int]
    ) -> dict[int, DraftedText]:
        """The texts of requests, by row, read up to at most one token before a length; without those that have no room.

        Args:
            contexts: The requests.
            lengths: The number of tokens of each to read.
            steps: The number of steps that follow for each.
        """
        texts: dict[int, DraftedText] = {}
        kept = {context.request_id for context in contexts}
        # all run the steps of the one with the most, as far as the longest text goes
        most = max(steps, default=0)
        for row, context in enumerate(contexts):
            room = self._model.longest - context.current_length
            tokens = context.all_tokens
            text = self._texts.pop(context.request_id, None)
            # the tokens of a text were checked, or are the draft model's own
            begin = 0 if text is None else text.common_length(context)
            if steps[row] > room or (tokens[begin:] >= self._model.vocabulary).any():
                self._close(context.request_id)
                continue
            if text is None or not self._follow(text, context):
                self._close(context.request_id)
                text = DraftedText.of(context, self._model.longest)
            # last: the most recently drafted one
            self._texts[context.request_id] = text
            if self._has_pages(text, min(most, room), kept):
                texts[row] = text
        # all but the last chunk: the caller's steps read that one
        while behind := [
            (text, end)
            for row, text in texts.items()
            if (end := self._chunk_end(text, lengths[row])) is not None
        ]:
            for text, end in behind:
                text.set_token_indices(active_idx=end)
            self._run([text for text, _ in behind], 1)
        return texts

    def _chunk_end(self, text: DraftedText, length: int) -> int | None:
        """Where the next chunk of a text ends that is to be read before the steps of a draft; None: there is none."""
        # then the last chunk gives the first drafted token
        whole = length == text.end_idx
        end = min(length, text.start_idx + self._chunk)
        if end <= text.start_idx or (whole and end == length):
            return None
        return end

    def _follow(self, text: DraftedText, context: TextContext) -> bool:
        """Makes a text that of its request, and what is cached of it too; False if it has to be read anew."""
        cache, held = self._model.kv_manager, text.start_idx
        common = text.follow(context)
        if common is None:
            return False
        if cache.contains(text.request_id):
            # one token at least is read, as its logits are needed
            length = self._certain(text, held, min(common, text.end_idx - 1))
            if length is None:
                return False
            # a state has no fewer tokens than asked for
            if cache.keep(text, length) != length and cache.slots is not None:
                return False
            # only now are its tokens certain, so that other requests may reuse their pages
            cache.step(text)
        return True

    def _has_pages(self, text: DraftedText, steps: int, kept_requests: set[RequestID]) -> bool:
        """Reserves the pages of a text for steps; requests outside of the batch lose theirs if there are too few."""
        cache = self._model.kv_manager
        while True:
            try:
                cache.reserve([text], steps)
                return True
            except OutOfPagesError:
                other = next(
                    (key for key in self._texts if key not in kept_requests), text.request_id
                )
                self.forget(other)
                if other == text.request_id:
                    return False

    def _run(self, texts: Sequence[DraftedText], steps: int) -> None:
        """Runs steps of the draft model."""
        if texts and steps > 0:
            batch = {text.request_id: text for text in texts}
            self._model.execute(TextGenerationInputs(batches=[dict(batch)], num_steps=steps))
