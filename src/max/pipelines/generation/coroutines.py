"""Runs coroutines from synchronous code."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from max._lazy import lazy_module

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = lazy_module("asyncio")  # its import takes as long as loading a small model

T = TypeVar("T")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to completion: in this thread, or in another one if this thread already runs an event loop.

    Args:
        coroutine: The coroutine.

    Returns:
        The result of the coroutine; its exception is raised here.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, "coroutine") as pool:
        return pool.submit(asyncio.run, coroutine).result()
