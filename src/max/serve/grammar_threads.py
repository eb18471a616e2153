"""Threads that compile grammars, so that a slow one delays neither streams nor prompts of other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from max.pipelines.structured.compile_threads import GrammarThreads

_R = TypeVar("_R")
_THREADS = GrammarThreads(2)


async def in_grammar_thread(make: Callable[..., _R], *arguments: Any) -> _R:
    """Runs a function that compiles a grammar in one of a few threads, and waits for its result.

    Args:
        make: The function.
        arguments: Its arguments.

    Raises:
        UserError: It, or the calls before it, took too long; see ``GrammarThreads.submit``.
        BaseException: The function raises it.
    """
    return await asyncio.wrap_future(_THREADS.submit(make, *arguments))
