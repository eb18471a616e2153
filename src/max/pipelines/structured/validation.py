"""Checks of grammars by llguidance."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from max._host.process_caches import cached_results
from max._lazy import lazy_module
from max.pipelines.core.exceptions import ConfigError, InputError
from max.pipelines.core.native_calls import native_calls
from max.pipelines.core.text import utf8

if TYPE_CHECKING:
    from max.pipelines.structured import deep_stack
else:
    deep_stack = lazy_module("max.pipelines.structured.deep_stack")

MAX_CHARACTERS = 256 << 10
"""The maximum length of a grammar. llguidance recurses over nested rules: up to 750 bytes of stack per character."""
guarded = native_calls("the grammar cannot be compiled", "Give a simpler one.", InputError)
_Result = TypeVar("_Result")
INLINE_CHARACTERS = 4 << 10
"""Grammars up to this length fit the default stack of a thread."""


def kept_results(
    entries: int, longest: int = 64 << 10
) -> Callable[[Callable[[str], _Result]], Callable[[str], _Result]]:
    """Keeps the results of a function of a text of a request, in bounded memory.

    Args:
        entries: The number of texts whose results are kept.
        longest: The most characters of such a text.
    """

    def decorate(function: Callable[[str], _Result]) -> Callable[[str], _Result]:
        kept = cached_results(entries)(function)

        @wraps(kept)  # `__wrapped__` is the cache
        def result(text: str) -> _Result:
            # the cache holds its keys, so long texts would take much memory
            return kept(text) if len(text) <= longest else function(text)

        return result

    return decorate


def llguidance() -> ModuleType:
    """Imports the package llguidance.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "structured output needs the package llguidance",
            'Install it with: pip install "supremum[serve]"',
        ) from error
    return llguidance


@guarded
def of_regex(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches as a whole.

    Args:
        pattern: The expression, in the syntax of Rust's regex crate: no backreferences, no look-around.

    Raises:
        InputError: The expression is invalid.
    """
    return valid_grammar(
        llguidance().LLMatcher.grammar_from_regex(utf8(pattern)), "regular expression"
    )


def is_regex(pattern: str) -> bool:
    """Whether a regular expression can be part of a grammar.

    Args:
        pattern: The expression.
    """
    try:
        of_regex(pattern)
    except InputError:
        return False
    return True


def check_length(grammar: str, kind: str) -> None:
    """Refuses a grammar that is too long to compile.

    Args:
        grammar: The grammar in llguidance's form.
        kind: The kind of input that it was made from, for the error.

    Raises:
        InputError: The grammar is longer than ``MAX_CHARACTERS``.
    """
    if len(grammar) > MAX_CHARACTERS:
        raise InputError(
            f"the {kind} is too long: its grammar has {len(grammar)} characters",
            f"Give one with at most {MAX_CHARACTERS}.",
        )


def first_line(problem: str) -> str:
    """The first line of a llguidance error, without the parser state and grammar that follow.

    Args:
        problem: The message of the error.
    """
    text = " ".join(re.split(r"<state>|<grammar>|<backtrace>", problem)[0].split())
    return text if len(text) <= 500 else f"{text[:500]} …"


def valid_grammar(grammar: str, kind: str) -> str:
    """A grammar that llguidance accepts.

    Args:
        grammar: The grammar in llguidance's form.
        kind: The kind of input that it was made from, for the error.

    Raises:
        InputError: It is too long, or invalid.
    """
    check_length(grammar, kind)
    problem = _problem(grammar)
    if problem and not problem.startswith("WARNING"):
        raise InputError(
            f"the {kind} is invalid: {first_line(problem)}", f"Give a {kind} that fits."
        )
    return grammar


def grammar_problem(grammar: str) -> str | None:
    """The reason why a grammar cannot be compiled; None if it can.

    Args:
        grammar: The grammar in llguidance's form.
    """
    problem = _problem(grammar)
    return None if not problem or problem.startswith("WARNING") else first_line(problem)


@kept_results(128, longest=MAX_CHARACTERS)  # clients send the same schema repeatedly
def _problem(grammar: str) -> str:
    validate = guarded(llguidance().LLMatcher.validate_grammar)
    if len(grammar) <= INLINE_CHARACTERS:
        return validate(grammar)
    return deep_stack.on_deep_stack(lambda: validate(grammar))
