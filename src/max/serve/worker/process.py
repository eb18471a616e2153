"""The process that owns the engine."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.serve.process.settings import WorkerSettings
from max.serve.routers import lifeline
from max.serve.routers.address import DoorAddress
from max.serve.worker.life_signs import LifeSigns
from max.serve.worker.queued_channel import QueuedChannel

if TYPE_CHECKING:
    from max.serve.worker import engine
else:
    # only the new process needs the engine, and it starts the sooner
    engine = lazy_module("max.serve.worker.engine")


def _run(
    settings: WorkerSettings,
    connection: Connection,
    signs: LifeSigns,
    address: DoorAddress | None,
    life: Connection | None,
) -> None:
    """The main function of the process, whose imports are its own."""
    lifeline.hold(life)
    engine.run_worker(settings, connection, signs, address)


class WorkerProcess:
    """A started worker process, and the channel to it.

    Args:
        settings: The settings of the worker.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        # fork would copy the locks of this process's threads
        context = multiprocessing.get_context("spawn")
        self.signs = LifeSigns(settings.unhealthy_s)
        """Its signs of life."""
        self.door = DoorAddress.in_folder(settings.doors) if settings.doors else None
        """Where further processes of the server connect; None: they cannot."""
        here, there = context.Pipe()
        # on Windows a pipe has a class of its own, with the same methods
        pipe: ConnectionChannel[Any, Any] = ConnectionChannel(here, MessageCodec())  # pyright: ignore[reportArgumentType]
        self.channel = QueuedChannel(pipe)
        self._process = context.Process(
            target=_run,
            args=(settings, there, self.signs, self.door, lifeline.current_lifeline()),
            name="max worker",
            daemon=True,
        )
        try:
            self._process.start()
        except BaseException:
            self.channel.end_sends()
            raise
        finally:
            # otherwise the pipe would stay open after the end of the process
            there.close()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    @property
    def exit_reason(self) -> str:
        """How the process has ended, in words."""
        code = self._process.exitcode
        if code is None:
            return "it still runs"
        if code < 0:
            try:
                return f"signal {signal.Signals(-code).name}"
            except ValueError:
                return f"signal {-code}"
        return f"exit code {code}"

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the process.

        Args:
            timeout: The longest time in seconds; None: no limit.
        """
        self._process.join(timeout)

    def kill(self) -> None:
        """Ends the process at once, and waits for it."""
        # SIGKILL: a worker ignores SIGTERM, and one that hangs could not act on it
        self._process.kill()
        self._process.join()
        self.channel.end_sends()
