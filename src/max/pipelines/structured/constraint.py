"""Masks of the tokens that the grammars of a batch allow."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.interfaces import GenerationStatus, TextGenerationContext
from max.pipelines.core.exceptions import GrammarsWaitError, InputError
from max.pipelines.core.native_calls import native_calls
from max.pipelines.core.text_context import TextContext
from max.pipelines.structured.kept_tokens import KeptTokens
from max.pipelines.structured.step_masks import (
    MaskThread,
    MaskWork,
    StepMasks,
    fill,
    forced_tokens,
    unpack_mask,
)
from max.pipelines.structured.validation import first_line, llguidance

if TYPE_CHECKING:
    from max.pipelines.structured import call_masks, compile_threads
    from max.pipelines.structured import grammar as grammars
    from max.pipelines.structured.known_masks import late_matcher, string_rules, string_run
else:
    call_masks = lazy_module("max.pipelines.structured.call_masks")
    compile_threads = lazy_module("max.pipelines.structured.compile_threads")
    late_matcher = lazy_module("max.pipelines.structured.known_masks.late_matcher")
    string_rules = lazy_module("max.pipelines.structured.known_masks.string_rules")
    string_run = lazy_module("max.pipelines.structured.known_masks.string_run")
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


_MOST_ENDS = 16
"""The maximum number of sets of end tokens of which something is kept: requests bring sets of their own."""
Key = TypeVar("Key")
Result = TypeVar("Result")


class Constraints:
    """Tracks the grammars of requests, and computes the masks of their next tokens.

    Args:
        delegate: The underlying tokenizer of a ``TextTokenizer``.
    """

    def __init__(self, delegate: Any) -> None:
        self._delegate = delegate
        self._vocabularies: dict[tuple[int, ...], Any] = {}
        self._ordinary: dict[frozenset[int], npt.NDArray[np.bool_]] = {}
        self._texts: string_run.TokenTexts | None = None
        self._lock = threading.RLock()  # guards the above
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
        if self._thread.overdue >= compile_threads.MOST_OVERDUE:
            raise GrammarsWaitError(
                "the grammars of earlier requests take too long to follow, and nothing ends them",
                "Try again later.",
            )
        matcher = grammars.matcher_of(self._vocabulary(context.eos_token_ids), grammar)
        self._check_beginning(matcher)
        # a schema whose strings are simple: masks within them are known beforehand
        rules = string_rules.string_rules(grammar)
        if rules is not None:
            run = string_run.StringRun(rules, self._token_texts(context.eos_token_ids))
            matcher = late_matcher.LateMatcher(matcher, run)
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
            # llguidance finds a grammar of too many alternatives after the first token only
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
        masks = np.full((len(batch), self.words()), -1, np.int32)
        work = MaskWork(masks, deque((batch[row].matcher, row) for row in rows))
        return StepMasks(self._thread, work, lambda row, own: batch[row].set_matcher(own))

    def call_masks(
        self,
        batch: Sequence[TextGenerationContext],
        jumps: Sequence[bool],
        memory: call_masks.CallMemory,
        known_tokens: KeptTokens,
        steps: int,
    ) -> call_masks.CallMasks | call_masks.ReadyMasks:
        """The masks of the steps of a call, which are computed while it runs unless all are known.

        Args:
            batch: The requests; those with a grammar have a matcher.
            jumps: Whether tokens that its grammar forces are appended to a request without a step.
            memory: What the call reads.
            known_tokens: What is known of the tokens after which a call goes on.
            steps: The maximum number of steps.
        """
        rows = [
            call_masks.FollowedRow(
                context.matcher,
                jump,
                frozenset(context.eos_token_ids),
                getattr(context.matcher, "run", None),
            )
            for context, jump in zip(batch, jumps, strict=True)
        ]
        ready = call_masks.ReadyMasks.of(self._thread, rows, memory, steps)
        if ready is not None:
            return ready
        # the requests follow their tokens after the call
        with _guarded:
            for row in rows:
                row.matcher = None if row.matcher is None else row.matcher.deep_copy()
                row.run = None if row.run is None else row.run.copy()
        return call_masks.CallMasks(self._thread, rows, memory, known_tokens)

    def _token_texts(self, eos: Iterable[int]) -> string_run.TokenTexts:
        with self._lock:
            if self._texts is None:
                vocabulary = self._vocabulary(eos)

                def text_of(token: int) -> bytes | None:
                    return (
                        None
                        if vocabulary.is_special_token(token)
                        else vocabulary.decode_bytes([token])
                    )

                self._texts = string_run.TokenTexts.of(len(self._delegate), text_of)
            return self._texts

    def ordinary_tokens(self, eos: Iterable[int]) -> npt.NDArray[np.bool_]:
        """The tokens that stand in the middle of a text, such as a string of JSON: whole characters, none of which ends
        or escapes there as a rule; bool ``[vocab]``.

        Args:
            eos: The tokens that end the sequences of requests.
        """
        key = frozenset(eos)
        with self._lock:
            return _recent(self._ordinary, key, lambda: self._find_ordinary(key))

    def _find_ordinary(self, eos: Iterable[int]) -> npt.NDArray[np.bool_]:
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
        ends = context.status is GenerationStatus.END_OF_SEQUENCE and token in context.eos_token_ids
        try:
            with _guarded:
                # the token that ends the request is no part of the answer
                if ends and not matcher.is_error() and matcher.is_accepting():
                    return
                followed = matcher.consume_token(token)
                problem = "" if followed else first_line(matcher.get_error())
                if followed and ends and not matcher.is_accepting():
                    followed, problem = False, f"it needs the end token {token} within the answer"
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

    @staticmethod
    def take_plain(context: TextGenerationContext, tokens: Sequence[int]) -> bool:
        """Advances the matcher of a request by tokens if the grammar is known to allow each, and to force nothing after
        it; else returns False, and leaves the matcher where it is.

        Args:
            context: The request.
            tokens: The tokens.
        """
        take = getattr(context.matcher, "take_plain", None)
        return take is not None and take(tokens)

    def forced_tokens(self, context: TextGenerationContext) -> list[int]:
        """The tokens that the grammar of a request forces next, as the tokenizer writes their text.

        The last characters of a forced text are left out where the tokenizer could join them with what follows.

        Args:
            context: The request.
        """
        if (matcher := context.matcher) is None:
            return []
        with _guarded:
            return forced_tokens(matcher, context.eos_token_ids)

    def _vocabulary(self, eos: Iterable[int]) -> Any:
        """The tokenizer of llguidance with these end tokens; the last ones are kept."""
        size = len(self._delegate)
        # configs name end tokens that the tokenizer lacks, which no mask allows
        key = tuple(sorted(int(token) for token in eos if 0 <= token < size))

        def make() -> Any:
            text = _json_of(self._delegate)
            made = _tokenizer(text, n_vocab=size, eos_token=list(key) or None)
            # the text of an end token that is not special could stand within an answer, which would end there
            if plain := [token for token in key if not made.is_special_token(token)]:
                marked = _with_special(text, plain)
                made = _tokenizer(marked, n_vocab=size, eos_token=list(key))
            return made

        with self._lock:
            return _recent(self._vocabularies, key, make)


def _recent(results: dict[Key, Result], key: Key, make: Callable[[], Result]) -> Result:
    """The result of a key, made if it is not among the last ones, which stand in the order of their use."""
    found = results.pop(key) if key in results else make()
    results[key] = found
    if len(results) > _MOST_ENDS:
        del results[next(iter(results))]
    return found


def _json_of(tokenizer: Any) -> str:
    """A tokenizer as tokenizer.json has it."""
    own = getattr(tokenizer, "to_json", None)
    return own() if own is not None else tokenizer.backend_tokenizer.to_str()


def _with_special(text: str, tokens: Sequence[int]) -> str:
    """A tokenizer.json in which some tokens are special."""
    content = json.loads(text)
    vocabulary = content["model"]["vocab"]  # numbers of texts, or a list of texts with scores
    texts = (
        {number: text for text, number in vocabulary.items()}
        if isinstance(vocabulary, dict)
        else {number: text for number, (text, _) in enumerate(vocabulary)}
    )
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token in tokens:
        entry = added.get(token) or {"id": token, "content": texts[token], **flags}
        added[token] = {**entry, "special": True}
    content["added_tokens"] = [added[token] for token in sorted(added)]
    return json.dumps(content)


@native_calls("the tokenizer's tokens cannot be constrained", "Ask without a grammar.")
def _tokenizer(*args: Any, **kwargs: Any) -> Any:
    return llguidance().LLTokenizer(*args, **kwargs)
