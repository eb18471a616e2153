"""The loop of an engine process: it reads commands from a channel, and sends what their work gives.

What a process does with its requests is a :class:`Work`: `TextWork` generates text, `EncoderWork` computes vectors.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from max._host.disk_cache import default_cache
from max.pipelines.generation.process.channel import Channel
from max.pipelines.generation.process.commands import Shutdown
from max.pipelines.generation.process.events import (
    EngineReady,
    EngineStopped,
    ErrorInfo,
    StartCounts,
)

logger = logging.getLogger("max.pipelines")

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


def start_counts() -> StartCounts:
    """What this process has done to load a model."""
    stats = default_cache().stats
    return StartCounts(stats.num_made, stats.num_packed, stats.num_fetched, stats.fetched_bytes)


class StepSigns(Protocol):
    """Is told when the loop of an engine process works, so that another process can notice that it hangs."""

    def step_begins(self) -> None:
        """A step begins; an earlier one has ended."""
        ...

    def step_ends(self) -> None:
        """The loop waits for commands."""
        ...


class Work(ABC, Generic[CommandT, EventT]):
    """The work of an engine process. The thread of the loop calls all methods but :meth:`read` and :meth:`interrupt`.

    The loop reads, queues and obeys ``Shutdown`` itself.
    """

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether a step would do nothing."""

    @property
    def is_finished(self) -> bool:
        """Whether no request is open, so that a shutdown that finishes them can end the loop."""
        return self.idle

    @abstractmethod
    def begin(self) -> EngineReady:
        """Called once, before the first command is obeyed.

        Returns:
            The first event.
        """

    def after_begin(self) -> Sequence[EventT]:
        """The events that follow the first one, by default none."""
        return ()

    def read(self, message: Any, put: Callable[[CommandT], None]) -> None:
        """Prepares a message in the thread that reads the channel, so that running requests are not delayed.

        Args:
            message: The message.
            put: Queues what :meth:`obey` gets; by default the message. It may be called later, from any thread.
        """
        put(message)

    def interrupt(self) -> None:
        """Ends a running step early, as a command was queued; thread-safe. Does nothing by default."""

    def wait(self, commands: queue.SimpleQueue[CommandT | Shutdown]) -> CommandT | Shutdown:
        """Waits for a command while the work is idle.

        Args:
            commands: The queue of commands.
        """
        return commands.get()

    @abstractmethod
    def obey(self, command: CommandT, late: bool) -> Sequence[EventT]:
        """Executes a command.

        Args:
            command: The command.
            late: Whether a shutdown came before it.

        Returns:
            Its events, usually none.
        """

    @abstractmethod
    def step(self) -> Sequence[EventT]:
        """Does the next part of the work.

        Returns:
            Its events.
        """

    @abstractmethod
    def end(self, error: BaseException | None) -> Sequence[EventT]:
        """Ends the work, after the last step.

        Args:
            error: The error that has ended the loop; None: a shutdown, or the end of the channel.

        Returns:
            The last events of open requests; they are not sent after an error.
        """


class WorkerLoop(Generic[CommandT, EventT]):
    """Runs a work for the requests of a channel.

    Args:
        work: The work.
        channel: The engine's end of the channel.
        signs: Is told when steps begin and end; None: nobody is.
    """

    def __init__(
        self, work: Work[CommandT, EventT], channel: Channel[Any, Any], signs: StepSigns | None
    ) -> None:
        self._work, self._channel, self._signs = work, channel, signs
        self._commands: queue.SimpleQueue[CommandT | Shutdown] = queue.SimpleQueue()
        self._shutdown: Shutdown | None = None

    def run(self) -> None:
        """Sends ``EngineReady``, runs the work until a shutdown or the end of the channel, sends ``EngineStopped``."""
        threading.Thread(target=self._read, name="engine commands", daemon=True).start()
        error: BaseException | None = None
        try:
            self._channel.send(replace(self._work.begin(), start=start_counts()))
            self._channel.send_all(self._work.after_begin())
            while not self._is_stopped:
                # asked before commands are read: an idle loop waits for one
                idle = self._work.idle
                if self._signs is not None and not idle:
                    self._signs.step_begins()
                self._obey(wait=idle)
                # the shutdown may be among the commands
                if not self._is_stopped:
                    self._channel.send_all(self._work.step())
        except OSError:
            pass  # the channel is closed
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._end(error)

    @property
    def _is_stopped(self) -> bool:
        if self._shutdown is None:
            return False
        return not self._shutdown.finish or self._work.is_finished

    def _read(self) -> None:
        """Reads the channel until a shutdown that does not finish; the end of the channel counts as one."""
        while True:
            try:
                message = self._channel.receive()
            except EOFError:
                if self._shutdown is None:
                    logger.warning("the other end of the engine's channel was closed; it stops")
                message = Shutdown()
            if not isinstance(message, Shutdown):
                self._work.read(message, self._put)
                continue
            self._put(message)
            if not message.finish:
                return

    def _put(self, command: CommandT | Shutdown) -> None:
        """Queues a command, and interrupts the step so that it is obeyed soon."""
        self._commands.put(command)
        self._work.interrupt()

    def _obey(self, wait: bool) -> None:
        """Executes the queued commands; waits for one if the work is idle."""
        while wait or not self._commands.empty():
            # the time of waiting is none of a step
            if wait and self._signs is not None:
                self._signs.step_ends()
            command = self._work.wait(self._commands) if wait else self._commands.get()
            if wait and self._signs is not None:
                self._signs.step_begins()
            wait = False
            if not isinstance(command, Shutdown):
                self._channel.send_all(self._work.obey(command, late=self._shutdown is not None))
                continue
            self._shutdown = command
            if not command.finish:
                return

    def _end(self, error: BaseException | None) -> None:
        """Ends the work; after an error, the other side fails the open requests or moves them to another engine."""
        events = self._work.end(error)
        try:
            if error is None:
                self._channel.send_all([*events, EngineStopped()])
            else:
                self._channel.send(EngineStopped(ErrorInfo.of(error)))
        except OSError:
            pass  # the channel is closed
