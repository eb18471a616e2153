"""Work on requests with large bodies, in threads: the event loop goes on with other requests meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from max.serve.limits import LARGE_BODY
from max.serve.request_context import current_request

P = ParamSpec("P")
R = TypeVar("R")
_THREADS = ThreadPoolExecutor(4, "body")
"""Threads of their own: the event loop's threads serve loads, pulls and shorter texts."""


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
    context = contextvars.copy_context()

    def call() -> R:
        return context.run(function, *arguments, **options)

    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
