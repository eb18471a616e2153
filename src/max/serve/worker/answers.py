"""The answers of a worker to numbered commands, which are not about a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from max.pipelines.generation.process.commands import Command
from max.pipelines.generation.process.events import AdapterChanged, PrefixesForgotten, PrefixesKept

Answer: TypeAlias = PrefixesForgotten | PrefixesKept | AdapterChanged


class Answers:
    """The commands of a replica that wait for an answer.

    Args:
        send: Sends a command to the worker.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._last = 0
        self._waiting: dict[int, asyncio.Future[Answer | None]] = {}

    @property
    def are_awaited(self) -> bool:
        """Whether a command waits for its answer."""
        return bool(self._waiting)

    def tell(self, command: Callable[[int], Command]) -> int:
        """Sends a command whose answer nobody awaits.

        Args:
            command: Makes it of its number.

        Returns:
            Its number.
        """
        self._last += 1
        self._send(command(self._last))
        return self._last

    async def ask(self, command: Callable[[int], Command]) -> Answer | None:
        """Sends a command, and waits for its answer.

        Args:
            command: Makes it of its number.

        Returns:
            The answer; None: the worker was lost.
        """
        number, answer = self._last + 1, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self.tell(command)
            return await answer
        finally:
            del self._waiting[number]

    def take(self, event: Answer) -> None:
        """Hands an answer to who awaits it."""
        answer = self._waiting.get(event.number)
        if answer is not None and not answer.done():
            answer.set_result(event)

    def end(self) -> None:
        """Ends all waits, as the worker is lost."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)
