"""The answers of a worker to numbered commands, which are not about a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from max.pipelines.generation.process.commands import (
    Command,
    KeepPrefixes,
    LoadAdapter,
    UnloadAdapter,
)
from max.pipelines.generation.process.events import AdapterChanged, PrefixesForgotten, PrefixesKept
from max.serve.worker.engine_state import EngineUnavailableError

_LOST = "the worker process has ended"
MOST_UNANSWERED = 1000
"""The commands that a worker may leave without an answer before it gets no further ones."""
Answer: TypeAlias = PrefixesForgotten | PrefixesKept | AdapterChanged


class Answers:
    """The commands of a replica that wait for an answer.

    Args:
        send: Sends a command to the worker.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._last = self._answered = 0
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

        Raises:
            EngineUnavailableError: `MOST_UNANSWERED` wait, also such that nobody awaits any more.
        """
        if self._last - self._answered >= MOST_UNANSWERED:
            raise EngineUnavailableError("the engine does not answer; try again later")
        # `tell` gives the command this number
        number, answer = self._last + 1, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self.tell(command)
            return await answer
        finally:
            del self._waiting[number]

    async def keep_prefixes(self, action: str, name: str) -> tuple[int, int]:
        """Saves the cached prefixes to a file, restores those of a file, or removes a file.

        Args:
            action: ``save``, ``restore`` or ``erase``.
            name: The name of the file.

        Returns:
            The tokens whose pages were saved or restored, and the size of the file.

        Raises:
            UserError: The file cannot be used.
            RuntimeError: The worker was lost.
        """
        kept = await self.ask(lambda number: KeepPrefixes(number, action, name))
        if not isinstance(kept, PrefixesKept):
            raise RuntimeError(_LOST)
        if kept.error is not None:
            raise kept.error.to_exception()
        return kept.tokens, kept.bytes

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Loads an adapter, or unloads it when its requests have ended.

        Args:
            name: Its name.
            path: Its folder or file; None: it is unloaded.

        Raises:
            UserError: It cannot be loaded, or none of this name is loaded.
            RuntimeError: The worker was lost.
        """
        changed = await self.ask(adapter_change(name, path))
        if not isinstance(changed, AdapterChanged):
            raise RuntimeError(_LOST)
        if changed.error is not None:
            raise changed.error.to_exception()

    def take(self, event: Answer) -> None:
        """Hands an answer to who awaits it."""
        self._answered = max(self._answered, event.number)
        answer = self._waiting.get(event.number)
        if answer is not None and not answer.done():
            answer.set_result(event)

    def end(self) -> None:
        """Ends all waits, as the worker is lost."""
        self._answered = self._last  # a new worker owes none
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)


def adapter_change(name: str, path: str | None) -> Callable[[int], Command]:
    """The command that loads an adapter, or unloads it, of its number.

    Args:
        name: The name of the adapter.
        path: Its folder or file; None: it is unloaded.
    """
    if path is None:
        return lambda number: UnloadAdapter(number, name)
    return lambda number: LoadAdapter(number, name, path)
