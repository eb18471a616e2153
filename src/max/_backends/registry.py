"""Which backend belongs to a device: a table by the API that programs the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from max._backends.backend import Backend, BackendOptions, Backends
from max.driver import CPU, Device

__all__ = ["backends_for", "register_backend"]


BackendFactory = Callable[[Device, BackendOptions], Backend]
_factories: dict[str, BackendFactory | str] = {"cpu": "max._backends.cpu.backend:make_backend"}
"""The factory of each kind of device, or its module and name: a module is imported at its first use."""


def register_backend(api: str, factory: BackendFactory) -> None:
    """Adds a kind of device.

    Args:
        api: What `Device.api` of such a device is.
        factory: Makes the backend of one device for a session.
    """
    _factories[api] = factory


def backends_for(devices: Iterable[Device], options: BackendOptions) -> Backends:
    """The backends of a session.

    Args:
        devices: The devices of the session. The CPU always takes part.
        options: The options of the session.

    Raises:
        ValueError: No backend is registered for a device.
    """
    accelerators = [device for device in devices if not device.is_host]
    others = {(device.label, device.id): _backend(device, options) for device in accelerators}
    return Backends(_backend(CPU(), options), others)


def _backend(device: Device, options: BackendOptions) -> Backend:
    """The backend of one device."""
    factory = _factories.get(device.api)
    if factory is None:
        names = ", ".join(_factories)
        raise ValueError(
            f"{device.label}:{device.id}: no backend for the API {device.api!r}; there are {names}"
        )
    if isinstance(factory, str):
        module, _, name = factory.partition(":")
        # imported once: the table keeps the factory
        factory = _factories[device.api] = getattr(import_module(module), name)
    made: BackendFactory = factory
    return made(device, options)
