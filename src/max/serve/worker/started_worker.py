"""A started worker process as an event loop sees it, and threads that wait for its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from max.pipelines.core.exceptions import ConfigError
from max.serve.process.settings import WorkerSettings
from max.serve.worker.engine_state import NoMachineError
from max.serve.worker.life_signs import Signs
from max.serve.worker.queued_channel import QueuedChannel

logger = logging.getLogger("max.serve")


class Worker(Protocol):
    """A started worker process; ``WorkerProcess`` implements it."""

    @property
    def channel(self) -> QueuedChannel:
        """The server's end of the channel."""
        ...

    @property
    def signs(self) -> Signs | None:
        """Its signs of life; None: it is not watched."""
        ...

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        ...

    @property
    def exit_reason(self) -> str:
        """How the process has ended, in words."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the process.

        Args:
            timeout: The longest time in seconds; None: no limit.
        """
        ...

    def kill(self) -> None:
        """Ends the process at once, and waits for it."""
        ...


@dataclass(frozen=True, eq=False)
class StartOf:
    """Starts workers of a replica, as it is called.

    Args:
        start: Starts a worker of its settings.
        settings: The settings.
    """

    start: Callable[[WorkerSettings], Worker]
    settings: WorkerSettings

    def __call__(self) -> Worker:
        """Starts a worker."""
        return self.start(self.settings)


_LAST_START_S = 2.0
"""Seconds that a start whose caller is cancelled is waited for."""
NO_MACHINE_S = 1.0
"""Seconds between two starts where the cluster has no room."""
_ENDS = ThreadPoolExecutor(32, "worker end")
"""Threads that wait for workers: an end may take a minute, and the loop's own threads serve prompts and loads."""


_STARTS = ThreadPoolExecutor(32, "worker start")
"""The same for starts, which wait for machines or for other processes."""


async def start_in_thread(start_worker: Callable[[], Worker]) -> Worker:
    """Starts a worker without stopping the event loop.

    If the caller is cancelled meanwhile, the worker is ended, as nothing else refers to it.

    Args:
        start_worker: Starts it.

    Raises:
        OSError: No process can be started.
    """
    loop = asyncio.get_running_loop()
    thread = _STARTS.submit(start_worker)
    starting = asyncio.wrap_future(thread)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # most starts are short; one that waits for a machine ends when the server leaves the cluster
        end = loop.time() + _LAST_START_S
        while not starting.done() and (left := end - loop.time()) > 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({starting}, timeout=left)
        # at once if it has started
        thread.add_done_callback(_kill_started)
        raise


def _kill_started(thread: Future[Worker]) -> None:
    if thread.exception() is None:
        thread.result().kill()


async def start_with_patience(start_worker: Callable[[], Worker]) -> Worker:
    """Starts a worker as :func:`start_in_thread` does, as soon as the cluster has room for it, however long that takes.

    Args:
        start_worker: Starts it.

    Raises:
        OSError: No process can be started for another reason.
    """
    while True:
        try:
            return await start_in_thread(start_worker)
        except NoMachineError as error:
            logger.error("%s; it is tried again", error)
            await asyncio.sleep(NO_MACHINE_S)


def refused_start(error: OSError) -> ConfigError:
    """What a user is told where the first worker of a replica cannot be started.

    Args:
        error: Why.
    """
    if isinstance(error, NoMachineError):
        remedy = "Start machines that have them, or ask for fewer replicas or cores."
    elif error.errno is None:
        remedy = "Each machine of the cluster needs the same version of supremum[serve,ray]."
    else:
        remedy = "Check the free memory, and the limits of processes and open files (`ulimit -a`)."
    reason = error.strerror or error
    return ConfigError(f"the worker process cannot be started: {reason}", remedy)


async def end_in_thread(worker: Worker, timeout: float | None) -> None:
    """Waits for the end of a worker without stopping the event loop; kills it if that takes too long.

    Goes on if the caller is cancelled meanwhile.

    Args:
        worker: The worker.
        timeout: The longest time in seconds; None: no limit.
    """

    def end() -> None:
        worker.join(timeout)
        worker.kill()

    await asyncio.get_running_loop().run_in_executor(_ENDS, end)


async def end_logged(worker: Worker, timeout: float) -> None:
    """Waits for the end of a worker whose channel is closed; logs an error, as the next worker must start anyway.

    Args:
        worker: The worker.
        timeout: The longest time in seconds, after which it is killed.
    """
    try:
        await end_in_thread(worker, timeout)
    except Exception:  # no thread could be started
        logger.exception("the end of a worker process cannot be awaited")


def kill_in_thread(worker: Worker) -> asyncio.Future[None]:
    """Kills a worker, and waits for its end, without stopping the event loop; goes on if nobody awaits the result."""
    return asyncio.get_running_loop().run_in_executor(_ENDS, worker.kill)
