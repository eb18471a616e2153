"""Devices as the compiler and the engine use them: one backend for each kind of device."""

from max._backends.backend import Backend, Backends, ProgramExecutor
from max._backends.cpu import CPUBackend, cpu_backends
from max._backends.registry import BackendOptions, backends_for, register_backend

__all__ = [
    "Backend",
    "BackendOptions",
    "Backends",
    "CPUBackend",
    "ProgramExecutor",
    "backends_for",
    "cpu_backends",
    "register_backend",
]
