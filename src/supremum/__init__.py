"""Where the command `max` starts: Ctrl-C ends it quietly while its modules are imported.

It is outside of the package `max`, whose import takes the longest part of the first tenth of a second, and loads no
module that Python's own start has not loaded: `_signal` is part of the interpreter, where `signal` imports two others.
"""

import _signal  # pyright: ignore[reportMissingImports]
import os

_INTERRUPTED = 130


def _end(number: int, frame: object) -> None:
    # an exception would print where the import of a module was
    os._exit(_INTERRUPTED)


def main() -> None:
    """Runs the command line, and exits."""
    before = _signal.getsignal(_signal.SIGINT)
    if before is _signal.default_int_handler:  # under nohup, or in a background job, it is ignored
        _signal.signal(_signal.SIGINT, _end)
    from max.entrypoints.cli import main as run_command_line

    if before is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, before)
    run_command_line()
