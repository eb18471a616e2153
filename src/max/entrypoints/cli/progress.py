"""Progress on stderr: one changing line on a terminal, one line a step in a pipe or on a dumb terminal."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from max._config import terminal_kind
from max._lazy import lazy_module
from max._load_steps import STEPS

if TYPE_CHECKING:
    from max._host import machine
else:
    # `max --help` needs no sizes
    machine = lazy_module("max._host.machine")

_INTERVAL_S = 0.1
_BAR_WIDTH = 24


def duration_text(seconds: float) -> str:
    """A time for people: ``8 s``, ``3:05``, ``1:02:03``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bar_text(at: int, size: int | None, seconds: float, begin: int = 0) -> str:
    """How far a transfer of bytes is: a bar, bytes, speed and the time that is left.

    Args:
        at: The bytes so far.
        size: All bytes; None: unknown.
        seconds: The time since the transfer began.
        begin: The bytes that were there when it began.
    """
    # what an earlier transfer has left does not count
    speed = (at - begin) / seconds if seconds > 0 else 0.0
    text = machine.byte_size(at)
    if size is not None:
        full = _BAR_WIDTH * at // max(size, 1)
        bar = f"{'━' * full}{'╌' * (_BAR_WIDTH - full)}"
        text = f"{bar} {100 * at // max(size, 1):>3} % {text} of {machine.byte_size(size)}"
    if seconds >= 1 and speed:
        text += f", {machine.byte_size(speed)}/s"
        if size is not None and size > at:
            text += f", {duration_text((size - at) / speed)} left"
    return text


def is_live() -> bool:
    """Whether a line of stderr can be overwritten: it is a terminal that knows how."""
    if sys.stderr is None or not sys.stderr.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        return False
    return sys.platform == "win32" or terminal_kind() not in ("", "dumb")


class Progress:
    """The steps of a command.

    On a terminal the line of the current step is overwritten, with the time since it began; else each step
    that has ended is a line with its time.
    """

    def __init__(self) -> None:
        self._live = is_live()
        self._line = _LiveLine() if self._live else None
        self._detail = ""

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Shows a step for the duration of a block, on a terminal with the parts of it that the engine tells.

        Args:
            what: The step in a few words.
        """
        begin = time.perf_counter()
        self.show(what, lambda: self._detail)
        try:
            with STEPS.handed_to(self._take):
                yield
        except BaseException:
            self.close()
            raise
        if not self._live:
            click.echo(f"{what}: {time.perf_counter() - begin:.2f} s", err=True)

    def show(self, what: str, detail: Callable[[], str]) -> None:
        """Shows a step on a terminal until the next one, or until the end.

        Args:
            what: The step in a few words.
            detail: Returns what it is at; empty: nothing is known.
        """
        begin = time.perf_counter()
        self._detail = ""

        def text() -> str:
            at = detail()
            return f"{what}{f', {at}' if at else ''} … {_elapsed_text(begin)}"

        if self._line is not None:
            self._line.show(text)

    def _take(self, step: str, num_done: int, total: int) -> None:
        self._detail = f"{step} {num_done}/{total}" if total else step

    def close(self) -> None:
        """Clears the line."""
        if self._line is not None:
            self._line.close()


class PullProgress:
    """The files of a pull: a bar on a terminal, else a line for each file."""

    def __init__(self) -> None:
        self._live = is_live()
        self._line = _LiveLine() if self._live else None
        self._file, self._text = "", ""
        self._began, self._begin = 0.0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._line is not None:
            self._line.close()

    def __call__(self, name: str, at: int, size: int | None) -> None:
        """Takes note of how far a file is.

        Args:
            name: The file.
            at: Its bytes so far.
            size: Its bytes; None: unknown.
        """
        if name != self._file:
            self._file, self._began, self._begin = name, time.perf_counter(), at
            if self._line is None:
                click.echo(
                    name if size is None else f"{name} ({machine.byte_size(size)})", err=True
                )
        self._text = bar_text(at, size, time.perf_counter() - self._began, self._begin)
        if self._line is not None:
            if at == size:
                self._line.leave(f"{name}: {self._text}")
            else:
                self._line.show(lambda: f"{self._file}: {self._text}")


class _LiveLine:
    """The last line of a terminal, drawn anew in short intervals by a thread."""

    def __init__(self) -> None:
        self._text: Callable[[], str] | None = None
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, text: Callable[[], str]) -> None:
        """Draws a text from now on.

        Args:
            text: Returns the text of the moment.
        """
        with self._lock:
            first, self._text = self._text is None, text
        # at once, as a step may end before the thread draws
        if first:
            self._draw()
        if self._thread is None:
            self._changed.clear()
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()

    def leave(self, text: str) -> None:
        """Draws a text that stays, and goes to the next line."""
        with self._lock:
            self._text = None
            click.echo(f"\r\x1b[K{_fit_line(text)}", err=True)

    def close(self) -> None:
        """Clears the line, and draws no more."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._changed.set()
        # no line is drawn after the one that clears it
        thread.join()
        with self._lock:
            self._text = None
            click.echo("\r\x1b[K", nl=False, err=True)

    def _run(self) -> None:
        while not self._changed.wait(_INTERVAL_S):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            if self._text is not None:
                click.echo(f"\r\x1b[K{_fit_line(self._text())}", err=True, nl=False)


def _fit_line(text: str) -> str:
    """A text that fits one line of the terminal: a longer one would not be overwritten as a whole."""
    width = shutil.get_terminal_size().columns - 1
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _elapsed_text(begin: float) -> str:
    seconds = time.perf_counter() - begin
    return f"{seconds:.1f} s" if seconds < 10 else duration_text(seconds)
