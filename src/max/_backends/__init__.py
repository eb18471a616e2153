"""Devices as the compiler and the engine use them: one backend for each kind of device."""

from max._backends.backend import Backend, BackendOptions, Backends, ProgramExecutor
from max._backends.registry import backends_for, register_backend

__all__ = [
    "Backend",
    "BackendOptions",
    "Backends",
    "ProgramExecutor",
    "backends_for",
    "register_backend",
]
