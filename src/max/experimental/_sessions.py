"""The sessions that programs of eager tensors and compiled modules share: one for each set of devices."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from max import driver
from max.engine import InferenceSession

__all__ = ["session_of"]

_sessions: dict[tuple[driver.Device, ...], InferenceSession] = {}
_lock = threading.Lock()


def session_of(devices: Iterable[driver.Device]) -> InferenceSession:
    """The session of some devices; the CPU is always among them.

    Args:
        devices: The devices, in any order.
    """
    ordered = tuple(sorted({driver.CPU(), *devices}, key=lambda d: (d.label, d.id)))
    with _lock:
        session = _sessions.get(ordered)
        if session is None:
            session = _sessions[ordered] = InferenceSession(devices=ordered)
    return session
