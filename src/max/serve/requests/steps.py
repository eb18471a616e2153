"""The steps in which requests are prepared: those that come at the same time go through each step together.

The parts of a request run much machine code once: the HTTP parser, the schema, the template, the tokenizer. Where the
requests that are ready pass one step one after another, its code stays in the processor's caches; a busy server then
takes about a seventh less time. They pass in groups: if all went together, all answers would come at the end.
"""

from __future__ import annotations

import asyncio
import types
from collections import deque
from collections.abc import Generator
from weakref import WeakKeyDictionary

MOST_TOGETHER = 16
"""The requests of a group; more do not make a step cheaper."""


class _Steps:
    """The requests of an event loop that are between two steps, and those that wait for their first one."""

    def __init__(self) -> None:
        self.passing = 0
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._is_called = False  # whether the loop calls `_admit`

    async def turn(self) -> None:
        """Waits until a group has room; the request counts as passing then."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self.waiting.append(place)
        if not self._is_called:
            self._is_called = True
            loop.call_soon(self._admit, loop)
        try:
            await place
        except asyncio.CancelledError:
            # its client left after it was admitted
            if not place.cancelled():
                self.passing -= 1
            raise

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets the first requests begin, as many as have room, once in each turn of the loop."""
        while self.waiting and self.passing < MOST_TOGETHER:
            place = self.waiting.popleft()
            if not place.done():
                self.passing += 1
                place.set_result(None)
        # those that pass keep the loop busy, so this is no idle wait
        self._is_called = bool(self.waiting)
        if self._is_called:
            loop.call_soon(self._admit, loop)


@types.coroutine
def _next_turn() -> Generator[None, None, None]:
    """Waits for the next turn of the loop, as `asyncio.sleep(0)` without its frame."""
    yield


_steps: WeakKeyDictionary[asyncio.AbstractEventLoop, _Steps] = WeakKeyDictionary()


async def next_step(is_first: bool = False) -> None:
    """Lets the other requests of the group come to this step.

    Args:
        is_first: Whether the request begins: it waits while a whole group is being prepared. Later steps never wait for
            requests that began later.
    """
    loop = asyncio.get_running_loop()
    steps = _steps.get(loop)
    if steps is None:
        steps = _steps[loop] = _Steps()
    if is_first and (steps.waiting or steps.passing >= MOST_TOGETHER):
        await steps.turn()
        steps.passing -= 1
        return
    steps.passing += 1
    try:
        await _next_turn()
    finally:
        steps.passing -= 1
