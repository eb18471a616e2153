"""Writes cached prefixes in a thread: fast while the engine is idle, slowly while requests run."""

from __future__ import annotations

import logging
import threading

from max.pipelines.kv_cache.prefix_store import PrefixWrite

logger = logging.getLogger("max.pipelines")

KEEP_DELAY_S = 0.5
"""The idle time in seconds after which an engine stores its new prefixes."""
KEEP_INTERVAL_S = 1.0
"""The interval in seconds at which a busy engine stores its new prefixes: a killed engine loses at most two seconds."""
BUSY_BYTES_PER_S = 64 << 20
"""The write rate in bytes per second while requests run."""


class PrefixKeeper:
    """Runs one write at a time; its methods are called by the engine's thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._idle, self._stopped = threading.Event(), False

    @property
    def writes(self) -> bool:
        """Whether a write is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: PrefixWrite) -> None:
        """Starts a write.

        Args:
            write: The pages to write; the previous write has ended.
        """
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="engine prefixes", daemon=True
        )
        self._thread.start()

    def resume(self) -> None:
        """Continues the write at full speed, as the engine is idle."""
        self._idle.set()

    def pause(self) -> None:
        """Slows the write down to `BUSY_BYTES_PER_S`, as requests run."""
        self._idle.clear()

    def stop(self) -> None:
        """Stops the current write and waits for its end; an unfinished file is removed."""
        if self._thread is None:
            return
        self._stopped = True
        # wakes a write that waits between two pages
        self._idle.set()
        self._thread.join()
        self._thread = None

    def _run(self, write: PrefixWrite) -> None:
        try:
            write.run(self._go_on)
        except Exception:  # the engine works without stored prefixes
            logger.exception("cached prefixes cannot be kept")

    def _go_on(self, page_bytes: int) -> bool:
        self._idle.wait(page_bytes / BUSY_BYTES_PER_S)
        return not self._stopped
