"""What the processes of a server have in common: a pipe that nobody writes to, and that ends with the first of them.

The process that an operator has started keeps the only end that could be written to. Engines and routers whose owner
is lost wait for the next one only as long as that process runs, so that none is left over.
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection, wait

_held: list[Connection] = []


def hold(lifeline: Connection | None) -> None:
    """Notes the pipe of this process, which its children get too.

    Args:
        lifeline: The end that is read; None: there is none.
    """
    _held[:] = [] if lifeline is None else [lifeline]


def current_lifeline() -> Connection | None:
    """The pipe of this process; None: there is none, so that engines and routers end with their owner."""
    return _held[0] if _held else None


def has_ended(lifeline: Connection) -> bool:
    """Whether the first process of the server has ended.

    Args:
        lifeline: The pipe.
    """
    return bool(wait([lifeline], 0))


def can_be_taken_over() -> bool:
    """Whether this system tells which process is behind a connection, and lets other than its parent wait for it."""
    return hasattr(os, "pidfd_open")


def end_with(lifeline: Connection) -> None:
    """Lets this process end as by a signal of an operator when the first process of the server has ended.

    Args:
        lifeline: The pipe.
    """

    def look() -> None:
        # nobody writes to it, so it is readable at its end only
        wait([lifeline])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="lifeline", daemon=True).start()
