"""The sessions of eager programs and compiled modules: one shared session for each set of devices."""

from __future__ import annotations

from collections.abc import Iterable

from max import driver
from max._host.process_caches import process_cache
from max._host.reentry import LockLevel, hold_lock, reentrant_lock
from max.engine import InferenceSession

__all__ = ["session_of"]

_sessions: dict[tuple[driver.Device, ...], InferenceSession] = process_cache({})
_lock = reentrant_lock(LockLevel.SESSIONS)


@hold_lock(_lock)
def session_of(devices: Iterable[driver.Device]) -> InferenceSession:
    """The shared session of a set of devices, to which the CPU is added.

    Args:
        devices: The devices, in any order.
    """
    ordered = tuple(sorted({driver.CPU(), *devices}, key=lambda d: (d.label, d.id)))
    session = _sessions.get(ordered)
    if session is None:
        session = _sessions[ordered] = InferenceSession(devices=ordered)
    return session
