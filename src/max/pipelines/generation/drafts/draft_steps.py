"""Steps of a pipeline that verify drafted tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import Device
from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.config.enums import SpeculativeMethod
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.draft_tree import (
    TREE_ROWS,
    draft_length,
    grown_tree,
    part_of_tree,
    tree_parents,
)
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.core.native_calls import native_calls
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.call_watch import CallWatch
from max.pipelines.generation.drafts.drafted_rows import DraftedRows
from max.pipelines.generation.drafts.drafter import Drafter, DraftersInTurn
from max.pipelines.generation.drafts.head import HeadDrafter
from max.pipelines.generation.drafts.lengths import DraftLengths
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.drafts.prediction import PredictionDrafter
from max.pipelines.generation.drafts.recent_answers import RecentAnswersDrafter
from max.pipelines.generation.steps.decode_loop import DecodeLoop
from max.pipelines.generation.steps.prompt_logits import wants_prompt_logits
from max.pipelines.generation.steps.step_tokens import reasoning_limit
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.state_slots import StateSlots
from max.pipelines.models.inputs import ModelOutputs
from max.pipelines.models.pipeline_model import PipelineModel
from max.pipelines.sampling.sampler import Sampler
from max.pipelines.structured.constraint import Constraints

__all__ = ["DraftSteps"]

_guarded = native_calls("drafted tokens cannot be compared with the grammar")


class DraftSteps:
    """Drafts the tokens of a pipeline's requests, and finds which of them are right.

    A drafted token is right if it is the token that the model chooses there: the likeliest one, or the one that the
    request's seed samples at this position. So a text is the same as without drafts, except that the logits of a step
    with several tokens may differ in their last bits.

    Args:
        drafter: Proposes the tokens.
        most: The maximum number of drafted tokens of a request.
        sampler: Chooses the tokens of rows.
        constraints: The grammars of requests; None: they have none.
        slots: The slots of recurrent states; None: the model has none.
        trees: Whether steps may verify several continuations of a request.
    """

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        sampler: Sampler,
        constraints: Constraints | None = None,
        slots: StateSlots | None = None,
        trees: bool = False,
    ) -> None:
        self._drafter, self.most, self._sampler = drafter, most, sampler
        self.trees = trees
        """Whether steps may verify several continuations of a request."""
        self._constraints, self._slots = constraints, slots
        self.lengths = DraftLengths(most, reads_again=slots is not None)
        """Chooses the lengths of drafts."""
        self._truncations: dict[RequestID, int] = {}  # as the drafter knows them
        self._last: list[
            RequestID
        ] = []  # the requests of the last execution, if it read no prompts
        self._ended = 0.0
        self.enabled = True
        """Whether tokens are drafted."""
        self.drafted, self.accepted, self.verified = 0, 0, 0
        """The number of tokens that were drafted, of those that were right, and of drafts."""

    @classmethod
    def of(
        cls,
        config: PipelineConfig,
        model: PipelineModel[Any],
        sampler: Sampler,
        cache: PagedKVCacheManager,
        constraints: Constraints,
        drafter: Drafter | None = None,
    ) -> DraftSteps | None:
        """The drafts of a configuration; None if it has none.

        Args:
            config: The configuration, resolved.
            model: The model.
            sampler: Chooses tokens.
            cache: Its cache.
            constraints: The grammars of requests.
            drafter: Proposes the tokens; None: the one that the configuration names.

        Raises:
            ConfigError: The model cannot verify drafted tokens.
        """
        method = config.speculative_method
        if method is None or not config.drafts_tokens:
            return None
        slots = cache.slots
        # wrong tokens are taken back, so a recurrent state has to be saved before them
        if not model.verifies_drafts or (slots is not None and not slots.spares):
            if method is SpeculativeMethod.auto:
                return None
            why = (
                "has recurrent states, and no memory is left to save one"
                if model.verifies_drafts
                else "gives one token a step"
            )
            raise ConfigError(
                f"speculative_method is {method.value!r}, and the model {why}",
                "Leave --speculative-method out.",
            )
        most = config.num_speculative_tokens
        if drafter is None:
            drafter = _drafter_of(config, model, cache)
        trees = cache.params.verifies_trees
        return cls(drafter, most, sampler, constraints, slots, trees)

    @property
    def kind_of_steps(self) -> int | None:
        """The first kind of the drafts of a model, whose tokens take steps of it; None: no drafter is a model."""
        return next((kind for kind, each in self._drafter.parts if each.takes_steps), None)

    def are_of_steps(self, batch: Iterable[TextContext]) -> bool:
        """Whether the drafts of requests are those of a model, whose tokens take steps of it.

        Args:
            batch: The requests.
        """
        first = self.kind_of_steps
        return first is not None and all(self._drafter.kind(c) >= first for c in batch)

    def warm_up(self) -> None:
        """Loads the graph that samples the rows of drafts before the first draft; thread-safe."""
        self._sampler.load_plain()

    def drop(self, batch: Iterable[TextGenerationContext]) -> None:
        """Removes the drafts of requests that now need more than the model's own choice of tokens.

        Args:
            batch: The requests; their options may have changed since they were drafted.
        """
        for context in batch:
            if (
                isinstance(context, TextContext)
                and context.draft_length
                and _needs_single_tokens(context)
            ):
                context.set_draft(())

    def plain_steps(
        self, batch: Sequence[TextGenerationContext], most: int, is_watched: bool = False
    ) -> int:
        """The number of steps to run in one call before tokens are drafted again.

        Args:
            batch: The requests.
            most: The maximum number of steps.
            is_watched: Whether the call ends early if :meth:`watch` says so.
        """
        # drafted tokens are verified by one step, and others are drafted then
        if any(map(draft_length, batch)):
            return 1
        if not self.enabled or all(map(_needs_single_tokens, batch)):
            return most
        steps = self.lengths.plain_steps(len(batch), is_watched)
        return most if steps is None else min(steps, most)

    def watch(self, batch: Sequence[TextGenerationContext]) -> CallWatch | None:
        """Watches the tokens of a call for those after which a draft pays; None: drafts of the batch need steps, or
        are not tried at all.

        Args:
            batch: The requests.
        """
        parts = self._drafter.parts
        if (
            not self.enabled
            or not self.lengths.may_draft(len(batch))
            or any(drafter.takes_steps for _, drafter in parts)
        ):
            return None
        # what a grammar leaves of a draft is known only when it has followed the text
        rows = [
            context
            if isinstance(context, TextContext)
            and not context.draft_length
            and context.matcher is None
            and not _needs_single_tokens(context)
            else None
            for context in batch
        ]
        return CallWatch(rows, parts, self.lengths) if any(rows) else None

    def watch_rounds(self, batch: Sequence[TextContext]) -> CallWatch | None:
        """Watches the tokens of steps with drafts of a model for those after which a prediction is drafted instead;
        None: no request has a prediction.

        Args:
            batch: The requests.
        """
        rows = [None if context.prediction is None else context for context in batch]
        if not any(rows):
            return None
        other, parts = self.kind_of_steps, self._drafter.parts
        parts = [(kind, each) for kind, each in parts if other is not None and kind < other]
        return CallWatch(rows, parts, self.lengths, other)

    def propose(self, batch: Sequence[TextGenerationContext]) -> None:
        """Drafts the tokens that the next step verifies.

        Args:
            batch: The requests of the last step, with their new tokens.
        """
        chunks: list[TextContext] = []
        contexts: list[TextContext] = []
        most: list[int] = []
        for context in batch:
            if not isinstance(context, TextContext):
                continue
            if context.is_done:
                # what is kept of it goes when it is released
                self._drafter.learn(context)
                continue
            if context.truncations != self._truncations.get(context.request_id, 0):
                self._truncations[context.request_id] = context.truncations
                self._drafter.rewind(context)
            if context.needs_ce:
                chunks.append(context)
                continue
            # a step gives one token more than it drafts, and both must fit
            (again,) = self.rows_again([context])
            room = min(self.most - again, context.max_length - context.end_idx - 1)
            saved = self._slots is None or len(contexts) < self._slots.spares
            if self.enabled and saved and room > 0 and not _needs_single_tokens(context):
                contexts.append(context)
                most.append(room)
        if chunks:
            self._drafter.read(chunks)
        # after chunks the next step reads prompts, which hides what drafts take
        if contexts and self.lengths.may_draft(len(batch)):
            self._draft(contexts, most, len(batch), sum(self.rows_again(batch)))
        if chunks:
            self._last = []
        self._ended = time.perf_counter()

    def rows_again(self, batch: Sequence[TextGenerationContext]) -> list[int]:
        """For each request the number of tokens that the next step reads again, as a recurrent state has gone back.

        Args:
            batch: The requests.
        """
        slots = self._slots
        return [0 if slots is None else slots.behind(c.request_id) for c in batch]

    def _draft(
        self, contexts: Sequence[TextContext], most: Sequence[int], requests: int, again: int
    ) -> None:
        """Drafts tokens of requests: each drafter those of the requests that the ones before it have no guess for."""
        # count: the rows of the step besides one for each request
        left, count = list(zip(contexts, most, strict=True)), again
        for first_kind, drafter in self._drafter.parts:
            if not left:
                break
            begin, before = time.perf_counter(), count
            if drafter.takes_steps:
                # before they are drafted: each token takes time
                asked, planned = list[tuple[TextContext, int]](), count
                for context, room in left:
                    length = self.lengths.length(
                        context.request_id, requests, planned, room, first_kind
                    )
                    planned += length
                    if length:
                        asked.append((context, length))
            else:
                asked = left
            own = [context for context, _ in asked]
            proposed = drafter.propose_all(own, [n for _, n in asked]) if asked else []
            for (context, room), tokens in zip(asked, proposed, strict=True):
                if not tokens:
                    continue
                # before the kind is asked for, which depends on it
                self._drafter.drafted_by(context.request_id, drafter)
                if drafter.takes_steps:
                    context.set_draft(_tokens_within_grammar(context, tokens))
                elif self._is_preferred(context, room, requests):
                    self._set_draft(context, drafter, tokens, room, requests, count)
                count += context.draft_length
            seconds = time.perf_counter() - begin
            self.lengths.record_drafting(count - before, seconds, first_kind)
            left = [(context, room) for context, room in left if not context.draft_length]

    def _is_preferred(self, context: TextContext, room: int, requests: int) -> bool:
        """Whether the last guess of a request is used if a model may draft in its place."""
        other, kind = self.kind_of_steps, self._drafter.kind(context)
        return other is None or self.lengths.prefers(
            context.request_id, requests, room, kind, other
        )

    def _set_draft(
        self,
        context: TextContext,
        drafter: Drafter,
        tokens: Sequence[int],
        room: int,
        requests: int,
        num_drafted: int,
    ) -> None:
        """Sets the draft of a request: the beginning of a continuation, or several ones as a tree.

        Args:
            context: The request.
            drafter: Proposed the tokens.
            tokens: The likeliest continuation.
            room: The maximum number of drafted tokens.
            requests: The number of requests of the step.
            num_drafted: The number of tokens that are drafted for others of them.
        """
        key, kind = context.request_id, self._drafter.kind(context)
        # a grammar is followed along one continuation only; the ancestors of a row are a word of TREE_ROWS bits
        rows = TREE_ROWS - (context.active_idx - context.start_idx)
        others = list[Sequence[int]]()
        if self.trees and context.matcher is None and rows > 1:
            others = drafter.alternatives(context, room)
        if not others:
            length = self.lengths.length(key, requests, num_drafted, len(tokens), kind)
            context.set_draft(_tokens_within_grammar(context, tokens[:length]))
            return
        tree, parents = grown_tree([tokens, *others])
        kept = self.lengths.kept_of_tree(key, requests, num_drafted, min(room, rows), parents, kind)
        context.set_draft(*part_of_tree(tree, parents, kept))

    def end_watch(self, watch: CallWatch) -> None:
        """Counts the time of a watch as that of drafts, after its call."""
        self.lengths.record_drafting(0, watch.seconds)

    def forget(self, request_id: RequestID) -> None:
        """Forgets a request that is released."""
        self._truncations.pop(request_id, None)
        self.lengths.forget(request_id)
        self._drafter.forget(request_id)

    def forget_answers(self) -> None:
        """Forgets the answers of ended requests."""
        self._drafter.forget_answers()

    def rows(self, batch: Sequence[TextGenerationContext]) -> DraftedRows | None:
        """The rows that verify the drafts of a batch; None if no request has one.

        Args:
            batch: The requests, whose next step has not begun.
        """
        return DraftedRows(batch, self._constraints) if any(map(draft_length, batch)) else None

    def verified_tokens(
        self,
        rows: DraftedRows,
        outputs: ModelOutputs,
        batch: Sequence[TextGenerationContext],
        device: Device,
    ) -> list[list[int]]:
        """The new tokens of drafted requests: those of the draft that are right, and the one after them.

        Args:
            rows: The rows that verify the drafts.
            outputs: The outputs of a step whose inputs had the drafted tokens.
            batch: The requests, before their new tokens.
            device: The device of the logits.

        Returns:
            The tokens of each request; none for a request without a draft.

        Raises:
            ValueError: The model did not return the logits of the drafted tokens.
        """
        rows.choose(outputs, self._sampler, device)
        tokens: list[list[int]] = [[] for _ in batch]
        for row, context in enumerate(batch):
            if rows.counts[row] and isinstance(context, TextContext):
                self._record(context, rows.accept(row))
                tokens[row] = rows.tokens(row)
        return tokens

    def _record(self, context: TextContext, right_tokens: Sequence[int]) -> None:
        """Records which drafted tokens of a request were right, by their indices."""
        drafted, right = context.draft_length, len(right_tokens)
        self.count(drafted, right)
        kind, key = self._drafter.kind(context), context.request_id
        if parents := tree_parents(context):
            self.lengths.record_tree(key, parents, right_tokens, kind)
        else:
            self.lengths.record_verification(key, drafted, right, kind)
        self._drafter.observe(context, right_tokens)

    def measure(
        self,
        batch: Sequence[TextGenerationContext],
        num_drafted: int,
        num_accepted: int,
        begin: float,
        steps: int,
        drafts_inside: bool = True,
    ) -> None:
        """Records the duration of an execution that read no prompts.

        Args:
            batch: The requests.
            num_drafted: The number of drafted tokens of each step.
            num_accepted: The number of right ones of all steps.
            begin: When it began.
            steps: The number of its steps.
            drafts_inside: Whether a model has drafted the tokens of all steps but the first one in this time.
        """
        requests, now = [context.request_id for context in batch], time.perf_counter()
        if requests == self._last:
            # from the end of the last one on: what runs between executions is a cost of each
            begin = self._ended
        self._last = requests
        seconds, kind = (now - begin) / steps, (self.kind_of_steps or 0) if drafts_inside else None
        self.lengths.step(requests, num_drafted, num_accepted, seconds, steps, kind)

    def text(self, context: TextContext, most: int) -> Sequence[int]:
        """The draft of a request, and what follows it in the text where it was found; none if it is of no text.

        Args:
            context: The request, as it was when the draft was made.
            most: The maximum number of tokens.
        """
        tokens = self._drafter.text(context, most)
        return tokens if tuple(tokens[: context.draft_length]) == context.draft_tokens else ()

    def grows(self, batch: Sequence[TextContext]) -> bool:
        """Whether a longer draft than that of a request would be made after a step in which all its tokens are right.

        Args:
            batch: The requests.
        """
        count = 0
        for context in batch:
            length = context.draft_length
            kind, later = (self._drafter.kind(context, more) for more in (0, length + 1))
            if length and later != kind:
                room = min(self.most, context.max_length - context.end_idx - length - 2)
                key, requests = context.request_id, len(batch)
                if self.lengths.length(key, requests, count, room, later) > length:
                    return True
            count += length
        return False

    def record_rounds(
        self,
        batch: Sequence[TextContext],
        lengths: Sequence[int],
        num_accepted: npt.NDArray[np.int64],
        begin: float,
        drafts_inside: bool,
    ) -> None:
        """Records which drafted tokens were right in a call of several steps, and its duration.

        Args:
            batch: The requests.
            lengths: The number of drafted tokens of each in a step.
            num_accepted: The number of right ones ``[steps, batch]``.
            begin: When it began.
            drafts_inside: As for :meth:`measure`.
        """
        for number, row in enumerate(num_accepted.tolist()):
            for context, length, right in zip(batch, lengths, row, strict=True):
                if not length:
                    continue
                self.count(length, right)
                # a text is followed as long as all tokens are right
                more = number * (length + 1)
                kind = self._drafter.kind(context, more)
                self.lengths.record_verification(context.request_id, length, right, kind)
                self._drafter.observe(context, range(right), more)
        accepted, steps = int(num_accepted.sum()), len(num_accepted)
        self.measure(batch, sum(lengths), accepted, begin, steps, drafts_inside)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Counts a draft that was verified.

        Args:
            num_drafted: The number of drafted tokens.
            num_accepted: The number of these that were right.
        """
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.verified += 1


def _drafter_of(
    config: PipelineConfig, model: PipelineModel[Any], cache: PagedKVCacheManager
) -> Drafter:
    """The drafter of a configuration: look-up in the request's prediction, in recent answers, of which a longer run
    must be equal, then in the request's own text, which costs no step; then a head of the checkpoint; if the
    configuration names a head, only this one after the prediction.
    """
    drafters: list[Drafter] = [PredictionDrafter()]
    if config.speculative_method not in (SpeculativeMethod.mtp, SpeculativeMethod.eagle3):
        drafters += [RecentAnswersDrafter(), LookupDrafter()]
    if (head := model.load_drafting_head()) is not None:
        loop = DecodeLoop.of(model.session, head)
        drafters.append(HeadDrafter(head, cache, loop, config.prefill_chunk_size))
    return DraftersInTurn(drafters)


def _needs_single_tokens(context: TextGenerationContext) -> bool:
    """Whether a request gets one token a step: functions of its caller see each one, or its reasoning has a budget."""
    return (
        bool(context.sampling_params.logits_processors)
        or reasoning_limit(context) is not None
        or wants_prompt_logits(context)
    )


def _tokens_within_grammar(context: TextContext, tokens: Sequence[int]) -> Sequence[int]:
    """The drafted tokens up to the first one that the request's grammar does not allow."""
    matcher = context.matcher
    if matcher is None or not tokens:
        return tokens
    # the end of the answer is no token of its grammar
    ends = (n for n, token in enumerate(tokens) if token in context.eos_token_ids)
    tokens = tokens[: next(ends, len(tokens))]
    with _guarded:
        return tokens[: matcher.validate_tokens(list(tokens))]
