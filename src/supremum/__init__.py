"""Where the command `max` starts: Ctrl-C ends it quietly while its modules are imported.

It is outside of the package `max`, whose import takes the longest part of the first tenth of a second.
"""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 130


def _end(number: int, frame: object) -> None:
    # an exception would print where the import of a module was
    os._exit(_INTERRUPTED)


def main() -> None:
    """Runs the command line, and exits."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # under nohup, or in a background job, it is ignored
        signal.signal(signal.SIGINT, _end)
    from max.entrypoints.cli import main as run_command_line

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    run_command_line()
