"""Threads that compile grammars: what is slow to compile holds up neither streams nor prompts of other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from max.serve.errors import ApiError

COMPILE_S = 10.0
"""The longest time in which a request's grammar is compiled, with the time that it waits for those before it."""
_R = TypeVar("_R")
_THREADS = ThreadPoolExecutor(2, "grammars")


async def in_grammar_thread(make: Callable[..., _R], *arguments: Any) -> _R:
    """Calls a function that compiles a grammar in one of a few threads, and waits for it.

    Args:
        make: The function.
        arguments: Its arguments.

    Raises:
        ApiError: It takes too long, with status 400, or those before it do, with status 503.
        BaseException: The function raises it.
    """
    begun = False

    def run() -> _R:
        nonlocal begun
        begun = True
        return make(*arguments)

    made = asyncio.get_running_loop().run_in_executor(_THREADS, run)
    done, _ = await asyncio.wait({made}, timeout=COMPILE_S)
    if done:
        return made.result()
    made.cancel()  # one that waits is never begun
    if begun:
        raise ApiError(
            f"the grammar takes more than {COMPILE_S:g} s to compile; give a smaller one",
            code="grammar_too_slow",
        )
    seconds = str(round(COMPILE_S))
    raise ApiError(
        f"the grammars of other requests take more than {COMPILE_S:g} s to compile; try again in {seconds} s",
        status=503,
        code="grammars_wait",
        headers={"Retry-After": seconds},
    )
