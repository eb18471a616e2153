"""Which backend belongs to a device: a table by the API that programs the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from max._backends.backend import Backend, Backends
from max._backends.cpu import CPUBackend
from max._dataclass import dataclass
from max._runtime import amx
from max._runtime.pool import shared_pool
from max.driver import Device

__all__ = ["BackendOptions", "backends_for", "register_backend"]


@dataclass(frozen=True)
class BackendOptions:
    """The options of a session for its backends.

    Args:
        num_threads: The number of CPU workers; None for one a core.
        batch_invariant: Whether kernels sum each row in an order independent of the number of rows.
    """

    num_threads: int | None = None
    batch_invariant: bool = False


BackendFactory = Callable[[Device, BackendOptions], Backend]
_factories: dict[str, BackendFactory] = {}


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
    target = amx.native_target()
    if options.batch_invariant:
        target = target.batch_invariantly()
    host = CPUBackend(shared_pool(options.num_threads), target)
    others: dict[tuple[str, int], Backend] = {}
    for device in devices:
        if device.is_host:
            continue
        factory = _factories.get(device.api)
        if factory is None:
            names = ", ".join(["cpu", *_factories])
            raise ValueError(
                f"{device.label}:{device.id}: no backend for the API {device.api!r}; there are {names}"
            )
        others[device.label, device.id] = factory(device, options)
    return Backends(host, others)
