"""Masks of the tokens that the grammars of a batch allow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.interfaces import GenerationStatus, TextGenerationContext
from max.pipelines.core.exceptions import GrammarsWaitError, InputError
from max.pipelines.core.native_calls import native_calls
from max.pipelines.core.text_context import TextContext
from max.pipelines.structured.compile_threads import MOST_OVERDUE
from max.pipelines.structured.next_masks import GrammarPlace, NextMasks
from max.pipelines.structured.step_masks import Mask, MaskThread, StepMasks, fill
from max.pipelines.structured.validation import first_line, llguidance

if TYPE_CHECKING:
    from max.pipelines.structured import grammar as grammars
else:
    grammars = lazy_module("max.pipelines.structured.grammar")  # not before the first grammar

_guarded = native_calls(
    "the answer's grammar cannot be followed", "Give a simpler one.", InputError
)
logger = logging.getLogger("max.pipelines")
_ORDINARY = r'[^"\\<]+'


def grammar_of(context: TextGenerationContext) -> str | None:
    """The grammar of a request; None without one."""
    grammar = getattr(context, "grammar", None)
    if grammar is None and context.json_schema is not None:
        return grammars.of_json_schema(context.json_schema)
    return grammar


def is_constrained(context: TextGenerationContext) -> bool:
    """Whether a request has a grammar."""
    return context.json_schema is not None or getattr(context, "grammar", None) is not None


class Constraints:
    """Tracks the grammars of requests, and computes the masks of their next tokens.

    Args:
        delegate: The underlying tokenizer of a ``TextTokenizer``.
    """

    def __init__(self, delegate: Any) -> None:
        self._delegate = delegate
        self._vocabularies: dict[tuple[int, ...], Any] = {}
        self._lock = threading.Lock()  # guards the vocabularies
        self._thread = MaskThread()

    def words(self) -> int:
        """The number of 32-bit words of a mask, one bit per token."""
        return (len(self._delegate) + 31) // 32

    def warm_up(self, eos_token_ids: Iterable[int]) -> None:
        """Builds the vocabulary before the first request with a grammar needs it; thread-safe.

        Args:
            eos_token_ids: The tokens that end the sequences of requests.

        Raises:
            ConfigError: llguidance is not installed.
        """
        self._vocabulary(eos_token_ids)

    def begin(self, context: TextGenerationContext) -> None:
        """Creates the matcher of a request that has a grammar but no matcher.

        Args:
            context: The request.

        Raises:
            InputError: The grammar is invalid.
            GrammarsWaitError: The masks of earlier requests exceed their time limit, and occupy all threads.
        """
        grammar = grammar_of(context)
        if context.matcher is not None or grammar is None:
            return
        if self._thread.overdue >= MOST_OVERDUE:
            raise GrammarsWaitError(
                "the grammars of earlier requests take too long to follow, and nothing ends them",
                "Try again later.",
            )
        matcher = grammars.matcher_of(self._vocabulary(context.eos_token_ids), grammar)
        self._check_beginning(matcher)
        # a context may bring generated tokens along: the matcher follows them
        for token in context.generated_tokens.tolist():
            matcher.consume_token(token)
        context.set_matcher(matcher)

    @_guarded
    def _check_beginning(self, matcher: Any) -> None:
        """Refuses a grammar that cannot be followed beyond its first token.

        Raises:
            InputError: The grammar is of that kind.
        """
        # a copy, as the matcher itself has consumed no token
        copy = matcher.deep_copy()
        mask = np.full((1, self.words()), -1, np.int32)
        fill(copy, mask[0])
        (allowed,) = unpack_mask(mask, len(self._delegate)).nonzero()[1:]
        if len(allowed):
            copy.consume_token(int(allowed[0]))
        if copy.is_error():
            raise InputError(
                f"the answer's grammar cannot be followed: {first_line(copy.get_error())}",
                "Give one with fewer alternatives at the same place.",
            )

    def start_masks(self, batch: Sequence[TextGenerationContext]) -> StepMasks | None:
        """Starts to compute the masks of a batch's next tokens, while the model runs.

        Args:
            batch: The requests; those with a grammar have a matcher.

        Returns:
            The masks ``[batch, words]``, one bit per token; None if no request has a grammar among those whose whole
                prompt is read in this step.
        """
        # a chunk of a prompt yields no token, so it needs no mask
        rows = [
            row
            for row, context in enumerate(batch)
            if context.matcher is not None and context.active_idx == context.end_idx
        ]
        if not rows:
            return None
        return StepMasks(self._thread, batch, rows, self.words())

    def start_next_masks(self, batch: Sequence[TextGenerationContext]) -> NextMasks:
        """Starts to compute the masks of the next step of a batch, which may begin later or not at all.

        Args:
            batch: The requests; those with a grammar have a matcher.
        """
        matchers: list[Any] = [context.matcher for context in batch]
        places = [GrammarPlace(None if m is None else m.deep_copy()) for m in matchers]
        rows = [row for row, place in enumerate(places) if place.matcher is not None]
        return NextMasks(
            batch, places, StepMasks(self._thread, cast(Any, places), rows, self.words())
        )

    def masks_after(
        self, batch: Sequence[TextGenerationContext], tokens: Sequence[Sequence[int]]
    ) -> Mask:
        """The masks after each of some tokens of each request. A request whose masks take too long gets a matcher that
        refuses its next token.

        Args:
            batch: The requests, before these tokens.
            tokens: The tokens of each request, at least one.

        Returns:
            int32 ``[batch, tokens, words]``: without bits after a token that may not follow, and without a grammar.
        """
        after: dict[int, tuple[Any, Sequence[int]]] = {}
        with _guarded:
            for row, context in enumerate(batch):
                if context.matcher is not None and not context.matcher.is_error():
                    matcher: Any = context.matcher.deep_copy()
                    if matcher.consume_token(tokens[row][0]):
                        after[row] = matcher, tokens[row][1:]
        if not after:
            return np.zeros((len(batch), max(map(len, tokens)), self.words()), np.int32)
        return StepMasks(self._thread, batch, [*after], self.words(), after).result()

    def ordinary_tokens(self, eos: Iterable[int]) -> npt.NDArray[np.bool_]:
        """The tokens that stand in the middle of a text, such as a string of JSON: whole characters, none of which ends
        or escapes there as a rule; bool ``[vocab]``.

        Args:
            eos: The tokens that end the sequences of requests.
        """
        vocabulary, mask = self._vocabulary(eos), np.zeros((1, self.words()), np.int32)
        fill(grammars.matcher_of(vocabulary, grammars.of_regex(_ORDINARY)), mask[0])
        found = unpack_mask(mask, len(self._delegate))[0]
        for token in found.nonzero()[0].tolist():
            try:
                vocabulary.decode_bytes([token]).decode()
            except UnicodeDecodeError:  # parts of characters, which the mask allows too
                found[token] = False
        return found

    def advance(self, context: TextGenerationContext, token: int) -> None:
        """Advances the matcher of a request by a token. If the grammar cannot be followed, the request ends with an
        error.

        Args:
            context: The request; the token is already part of it.
            token: The token.
        """
        matcher = context.matcher
        if matcher is None:
            return
        # the token that ends the request is no part of the answer
        if token in context.eos_token_ids and context.is_done and not matcher.is_error():
            return
        try:
            with _guarded:
                followed = matcher.consume_token(token)
                problem = "" if followed else first_line(matcher.get_error())
        except InputError as error:
            followed, problem = False, error.problem
        if not followed:
            logger.warning(
                "request %s: the grammar cannot be followed: %s", context.request_id, problem
            )
            context.status = GenerationStatus.CANCELLED
            if isinstance(context, TextContext):
                context.failure = InputError(
                    f"the answer's grammar cannot be followed: {problem}",
                    "Give one with fewer alternatives at the same place.",
                )

    def forced_tokens(self, context: TextGenerationContext) -> list[int]:
        """The tokens that the grammar of a request forces next, as the tokenizer writes their text.

        The last characters of a forced text are left out where the tokenizer could join them with what follows.

        Args:
            context: The request.
        """
        matcher = context.matcher
        if matcher is None or matcher.is_error():
            return []
        with _guarded:
            tokens: list[int] = matcher.compute_ff_tokens()
        ends = (place for place, token in enumerate(tokens) if token in context.eos_token_ids)
        return tokens[: next(ends, len(tokens))]

    def _vocabulary(self, eos: Iterable[int]) -> Any:
        """The tokenizer of llguidance with these end tokens; made once."""
        key = tuple(sorted(eos))
        with self._lock:
            if key not in self._vocabularies:
                self._vocabularies[key] = _tokenizer(
                    _json_of(self._delegate),
                    n_vocab=len(self._delegate),
                    eos_token=list(key) or None,
                )
            return self._vocabularies[key]


def _json_of(tokenizer: Any) -> str:
    """A tokenizer as tokenizer.json has it."""
    own = getattr(tokenizer, "to_json", None)
    return own() if own is not None else tokenizer.backend_tokenizer.to_str()


@native_calls("the tokenizer's tokens cannot be constrained", "Ask without a grammar.")
def _tokenizer(*args: Any, **kwargs: Any) -> Any:
    return llguidance().LLTokenizer(*args, **kwargs)


def unpack_mask(masks: Mask, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Unpacks masks to one byte per token.

    Args:
        masks: int32 ``[batch, words]``, one bit per token.
        vocabulary: The width of the logits; tokens beyond the mask are disallowed if the row has a constraint.

    Returns:
        bool ``[batch, vocabulary]``; True if a token is allowed.
    """
    # [batch, words] to [batch, 32 * words]
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    if bits.shape[1] >= vocabulary:
        return np.ascontiguousarray(bits[:, :vocabulary])
    # a request without a grammar has a mask of ones, and allows the tokens past the mask too
    free = (masks == -1).all(axis=1, keepdims=True)
    unmasked = np.broadcast_to(free, (len(masks), vocabulary - bits.shape[1]))
    return np.concatenate([bits, unmasked], axis=1)
