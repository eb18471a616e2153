"""Ends a process even if some of its threads never end."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

END_S = 1.0
"""The seconds that a process has to end by itself."""


def end_soon(code: int = 0) -> None:
    """Ends this process, whose work is done, after ``END_S`` seconds at the latest.

    The interpreter waits for all threads at its exit, and a thread that compiles a hostile grammar cannot be stopped.

    Args:
        code: The exit code.
    """

    def end() -> None:
        time.sleep(END_S)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # the reader has gone
        logging.shutdown()
        os._exit(code)

    threading.Thread(target=end, name="end", daemon=True).start()
