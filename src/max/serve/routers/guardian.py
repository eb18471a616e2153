"""The first process of a server with routers: it starts the owner of the engines, and another one if that is lost.

It does nothing else, so that little can end it. Engines and routers are taken over by the next owner where they are
(`max.serve.routers.handover`); what only the last owner had in memory is lost with it. When this process ends, its
pipe ends (`max.serve.routers.lifeline`), and with it all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from max.serve.routers import lifeline
from max.serve.routers.handover import Handover

logger = logging.getLogger("max.serve")

BEAT_S = 2.0
"""Seconds between two signs of life of an owner."""
MOST_FAILURES = 5
"""The owners in a row that may be lost before they are ready."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0
_LAST_S = 10.0
"""Seconds that other processes get to end after the last owner."""
_TOLD = 128 + signal.SIGTERM
"""The exit code of a server that a signal has ended before it was ready."""
_BECOME_PARENT = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux."""


class Guarded:
    """What an owner knows of the process that has started it.

    Args:
        beats: Tells it that the owner is ready, and that it goes on.
        last: What an earlier owner has left; None: this is the first one.
    """

    def __init__(self, beats: Connection, last: Handover | None) -> None:
        self._beats, self.last = beats, last

    def ready(self) -> None:
        """Tells that requests can run; in an event loop, which sends signs of life from now on."""
        with contextlib.suppress(OSError):
            self._beats.send_bytes(b".")
            asyncio.get_running_loop().call_later(BEAT_S, self.ready)


def _run(
    main: Callable[..., int],
    arguments: tuple[Any, ...],
    beats: Connection,
    life: Connection,
    folder: str,
) -> None:
    """The main function of an owner."""
    # signals of a terminal reach all processes, and the first one hands them on
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lifeline.hold(life)
    lifeline.end_with(life)
    try:
        code = main(*arguments, Guarded(beats, Handover.read(folder)))
    finally:
        if lifeline.has_ended(life):
            # the process that removes it is gone
            shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.exit(code)


class Guardian:
    """Runs owners one after another until one ends as it was told to.

    Args:
        main: The main function of an owner, which returns its exit code; its last argument is the :class:`Guarded`.
        arguments: The arguments before that.
        folder: The folder of the server.
        restart_s: Seconds without a sign of life after which an owner is ended; 0: it never is.
    """

    def __init__(
        self, main: Callable[..., int], arguments: tuple[Any, ...], folder: str, restart_s: float
    ) -> None:
        self._main, self._arguments = main, arguments
        self._folder, self._restart_s = folder, restart_s
        self._context = multiprocessing.get_context("spawn")
        # nobody writes to the second end; that it is closed is the sign
        self._life, self._kept = self._context.Pipe(duplex=False)
        self._owner: BaseProcess | None = None
        self._was_told = self._was_ever_ready = False
        self._own: set[int] = set()

    def run(self) -> int:
        """Runs owners; in the main thread.

        Returns:
            The exit code of the last one.
        """
        _become_parent_of_orphans()
        # the process that cleans up for `multiprocessing` ends after this one
        multiprocessing.resource_tracker.ensure_running()
        self._own = set(_children())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # under nohup the end of the terminal is ignored
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hand_on)
        failures = 0
        try:
            while True:
                was_ready, code = self._run_one()
                if self._was_told and self._was_ever_ready and code in (_TOLD, -signal.SIGTERM):
                    return 0  # it was to end before it had taken over
                # an owner that was never ready has said why; another one would fail as well
                if code == 0 or self._was_told or not self._was_ever_ready:
                    return code if code >= 0 else 128 - code
                failures = 0 if was_ready else failures + 1
                if failures >= MOST_FAILURES:
                    logger.error("no process can own the engines; the server ends")
                    return code if code >= 0 else 128 - code
                logger.error(
                    "the process that owns the engines has ended (%s); another one takes them over",
                    _how(code),
                )
                time.sleep(min(_FIRST_DELAY_S * 2**failures, _LONGEST_DELAY_S))
        finally:
            self._kept.close()
            self._end_others()

    def _run_one(self) -> tuple[bool, int]:
        """Runs an owner until it ends; whether it was ready, and its exit code, below 0 that of a signal."""
        beats, there = self._context.Pipe(duplex=False)
        with beats:
            self._owner = owner = self._context.Process(
                target=_run,
                args=(self._main, self._arguments, there, self._life, self._folder),
                name="max owner",
            )
            owner.start()
            there.close()
            was_ready, ended = False, False
            heard = time.monotonic()
            while owner.is_alive():
                # an end that is closed would be ready for ever
                sources = [owner.sentinel] if ended else [owner.sentinel, beats]
                found = wait(sources, BEAT_S)
                now = time.monotonic()
                if beats in found:
                    try:
                        beats.recv_bytes(16)
                        was_ready, heard = True, now
                        self._was_ever_ready = True
                    except (OSError, EOFError):
                        ended = True
                # before it is ready it gives no signs: a load may take any time
                elif was_ready and not found and 0 < self._restart_s < now - heard:
                    logger.error("the process that owns the engines does not respond; it is ended")
                    owner.kill()
                # `multiprocessing` takes the end of the owner itself
                _reap(owner.pid)
            owner.join()
            return was_ready, owner.exitcode or 0

    def _hand_on(self, signal_number: int, frame: Any) -> None:
        """Tells the owner of a signal that ends the server."""
        self._was_told = True
        if self._owner is not None and self._owner.pid is not None:
            self._owner.terminate()

    def _end_others(self) -> None:
        """Waits until all processes of the server have ended; those that do not are killed."""
        end = time.monotonic() + _LAST_S
        # engines and routers of lost owners are its children too
        while left := set(_children()) - self._own:
            _reap(None)
            if time.monotonic() > end:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _become_parent_of_orphans() -> None:
    """Lets the engines and routers of a lost owner become children of this process, so that it finds their ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_BECOME_PARENT, 1, 0, 0, 0)


def _children() -> list[int]:
    """The numbers of this process's children."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:  # the system does not tell
        return []
    return [int(word) for word in text.split()]


def _reap(owner: int | None) -> None:
    """Takes the ends of children but the owner's."""
    for pid in _children():
        if pid != owner:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
