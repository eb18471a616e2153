"""The longest stretches of CPU time in which an event loop, or a thread of it with the GIL, does one thing."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from max.serve.requests import threads as request_threads

FREE = frozenset({"encode_batch_fast"})
"""Functions that run without the GIL."""


class Stretches:
    """The longest stretches, by what took them."""

    def __init__(self) -> None:
        self.loop, self.thread = (0.0, ""), (0.0, "")

    def profile(self) -> Callable[[FrameType, str, Any], None]:
        """A hook of ``sys.setprofile`` for one thread: between two events no other thread can take the GIL."""
        last, before = time.thread_time(), ""

        def note(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal last, before
            name = getattr(argument, "__name__", "") if event.startswith("c_") else ""
            taken = time.thread_time() - last
            if taken > self.thread[0] and not (event == "c_return" and name in FREE):
                code = frame.f_code
                self.thread = (
                    taken,
                    f"{name or event} in {code.co_name}:{frame.f_lineno}, after {before}",
                )
            before = f"{event} {name or frame.f_code.co_name}"
            last = time.thread_time()

        return note

    def __str__(self) -> str:
        return ", ".join(
            f"{1e3 * taken:.0f} ms: {what}" for taken, what in (self.loop, self.thread)
        )


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stretches]:
    """Measures the event loops and the threads of bodies that run meanwhile."""
    found = Stretches()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        run(handle)
        taken = time.thread_time() - begin
        if taken > found.loop[0]:
            found.loop = (taken, repr(handle)[:300])

    def start() -> None:
        sys.setprofile(found.profile())

    threads = ThreadPoolExecutor(2, initializer=start)
    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    monkeypatch.setattr(request_threads, "_BODY_THREADS", threads)
    # as a server does: the objects of the imports are not visited by each collection
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield found
    finally:
        if not frozen:  # else those of the whole run would be thawed, and each collection after it visit millions
            gc.unfreeze()
        monkeypatch.undo()
        threads.shutdown()
