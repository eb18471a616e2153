"""The end of a process, whatever its threads do."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

END_S = 1.0
"""The time that a process gets to end by itself."""


def end_soon(code: int = 0) -> None:
    """Has this process end, at the latest after ``END_S``: its work is done.

    Without it the interpreter waits for all threads, and nothing ends one that compiles a hostile grammar.

    Args:
        code: The exit code.
    """

    def end() -> None:
        time.sleep(END_S)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads it any more
        logging.shutdown()
        os._exit(code)

    threading.Thread(target=end, name="end", daemon=True).start()
