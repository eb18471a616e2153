"""Threads for the work of requests that takes long: the event loop goes on with other requests meanwhile.

Large bodies and grammars have threads of their own, so that a slow grammar delays neither streams nor prompts.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from max.pipelines.structured.compile_threads import GrammarThreads
from max.serve.limits import LARGE_BODY
from max.serve.requests.request_context import current_request

P = ParamSpec("P")
R = TypeVar("R")
_BODY_THREADS = ThreadPoolExecutor(4, "body")
"""Threads of their own: the event loop's threads serve loads, pulls and shorter texts."""
_GRAMMAR_THREADS = GrammarThreads(2)


async def by_size(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Calls a function whose time grows with the body of the running request: in a thread if the body is large.

    Args:
        function: The function.
        arguments: Its arguments.
        options: Its named arguments.
    """
    if current_request().body_bytes <= LARGE_BODY:
        return function(*arguments, **options)
    return await in_body_thread(function, *arguments, **options)


async def in_body_thread(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Calls a function in a thread.

    Args:
        function: The function.
        arguments: Its arguments.
        options: Its named arguments.
    """
    # the running request is in it
    context = contextvars.copy_context()

    def call() -> R:
        return context.run(function, *arguments, **options)

    return await asyncio.get_running_loop().run_in_executor(_BODY_THREADS, call)


async def in_grammar_thread(make: Callable[..., R], *arguments: Any) -> R:
    """Runs a function that compiles a grammar in one of a few threads, and waits for its result.

    Args:
        make: The function.
        arguments: Its arguments.

    Raises:
        UserError: It, or the calls before it, took too long; see ``GrammarThreads.submit``.
        BaseException: The function raises it.
    """
    return await asyncio.wrap_future(_GRAMMAR_THREADS.submit(make, *arguments))
