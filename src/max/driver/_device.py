"""Devices, their streams and events, and the kinds of accelerators."""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import Any, ClassVar, Protocol, Self

from max._errors import NoAcceleratorError
from max._host.machine import logical_cpus
from max._host.reentry import reentrant_lock
from max.driver._memory import DeviceMemory, HostMemory


class Device:
    """A device that holds tensors and runs models.

    Abstract: use :class:`CPU` or :class:`Accelerator`. There is one instance per label and id: devices compare by
    identity.
    """

    __module__ = "max.driver"
    __slots__ = ("_default_stream", "_id", "memory")

    _id: int
    _default_stream: DeviceStream
    memory: DeviceMemory
    """The device's memory, in which tensors are allocated and copied."""
    useful_batch_size: ClassVar[int] = 512
    """The number of sequences beyond which a larger batch of a text model gains no throughput."""

    def __new__(cls, id: int = -1) -> Self:
        if cls is Device:
            raise TypeError("Device has no instances of its own; use CPU() or Accelerator()")
        return super().__new__(cls)

    @staticmethod
    def cpu(id: int = -1) -> CPU:
        """The CPU device of that id; see :class:`CPU`."""
        return CPU(id)

    @property
    def api(self) -> str:
        """The API that programs the device: ``cpu``, ``cuda`` or ``hip``."""
        raise NotImplementedError

    @property
    def architecture_name(self) -> str:
        """The name of the accelerator's architecture, such as ``sm_90``.

        Raises:
            ValueError: On a CPU device.
        """
        raise NotImplementedError

    @property
    def default_stream(self) -> DeviceStream:
        """The default stream of the device; always the same object."""
        return self._default_stream

    @property
    def default_queue(self) -> DeviceStream:
        """The default stream: `default_stream`."""
        return self._default_stream

    @property
    def id(self) -> int:
        """The zero-based id; ``label`` and id identify the device, as in ``gpu:1``."""
        return self._id

    @property
    def is_compatible(self) -> bool:
        """Whether models can run on this device."""
        raise NotImplementedError

    @property
    def is_host(self) -> bool:
        """Whether this is a CPU device, whose memory the host reads and writes."""
        raise NotImplementedError

    @property
    def is_host_unified(self) -> bool:
        """Whether the host reads and writes the device's memory in place."""
        return self.memory.addressable

    @property
    def label(self) -> str:
        """``cpu`` for host devices, ``gpu`` for accelerators."""
        raise NotImplementedError

    @property
    def max_single_alloc_size(self) -> int:
        """The largest number of bytes that one tensor may have: the device's memory.

        Raises:
            ValueError: The platform does not report it.
        """
        total = self.stats.get("total_memory")
        if total is None:
            raise ValueError(f"{self.label}:{self.id} does not report its memory")
        return int(total)

    @property
    def model_name(self) -> str:
        """The name of the device's model; ``cpu`` for host devices."""
        return self.label if self.is_host else self.architecture_name

    @property
    def stats(self) -> dict[str, Any]:
        """The current usage of the device; sizes in bytes."""
        raise NotImplementedError

    def can_access(self, other: Device) -> bool:
        """Whether this device can access the memory of the other one directly."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Returns when all operations on this device are complete.

        Raises:
            ValueError: A queued operation failed.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"Device(type={self.label},id={self.id})"

    def __copy__(self) -> Device:
        return self

    def __deepcopy__(self, memo: object) -> Device:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.id,)


_HOST_MEMORY = HostMemory()
"""The memory of all CPU devices."""


class CPU(Device):
    """The host as a device.

    Ids above 0 are virtual devices on the same memory and cores, for placing a graph on several devices without an
    accelerator. Calls with the same id return the same object.

    Args:
        id: The device's id; -1 is device 0.

    Raises:
        ValueError: The id is below -1.
    """

    __module__ = "max.driver"
    __slots__ = ()

    useful_batch_size = 32
    _instances: ClassVar[dict[int, Any]] = {}
    _lock: ClassVar[threading.RLock] = reentrant_lock()

    def __new__(cls, id: int = -1) -> Self:
        if id < -1:
            raise ValueError(f"CPU: id {id} is not a device; expected -1, 0, 1, …")
        key = max(id, 0)
        # most calls find the device, without the lock
        device = cls._instances.get(key)
        if device is not None:
            return device
        with cls._lock:
            device = cls._instances.get(key)
            if device is None:
                device = super().__new__(cls)
                device._id = key
                device.memory = _HOST_MEMORY
                device._default_stream = DeviceStream(device)
                cls._instances[key] = device
            return device

    @property
    def api(self) -> str:
        """Always ``cpu``."""
        return "cpu"

    @property
    def architecture_name(self) -> str:
        """Not available.

        Raises:
            ValueError: Always; only accelerators have an architecture name.
        """
        raise ValueError(
            f"{self.label}:{self.id} has no architecture name; only accelerators have one"
        )

    @property
    def is_compatible(self) -> bool:
        """Always true: kernels are compiled for the CPU of this machine."""
        return True

    @property
    def is_host(self) -> bool:
        """Always true."""
        return True

    @property
    def label(self) -> str:
        """Always ``cpu``."""
        return "cpu"

    @property
    def stats(self) -> dict[str, Any]:
        """``num_cores``; ``total_memory`` and ``free_memory`` in bytes on platforms that report them."""
        # Windows has no sysconf
        stats: dict[str, Any] = {"num_cores": len(logical_cpus())}
        names = {"total_memory": "SC_PHYS_PAGES", "free_memory": "SC_AVPHYS_PAGES"}
        available: dict[str, int] = getattr(os, "sysconf_names", {})
        for key, name in names.items():
            if name in available:
                stats[key] = os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
        return stats

    def can_access(self, other: Device) -> bool:
        """Whether the other device is a CPU device, which shares the memory."""
        if not isinstance(other, Device):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"can_access: expected a Device, got {type(other).__name__}")
        return other.is_host

    def synchronize(self) -> None:
        """Returns at once: operations on the CPU are complete when their call returns."""


class Accelerator(Device):
    """A GPU or other accelerator.

    A kind of accelerator is a subclass that implements the properties of :class:`Device`, registered with
    :func:`register_accelerators`. It runs programs if a backend is registered for its ``api`` (``max._backends``).

    Args:
        id: The device's id; -1 is the first one.
        device_memory_limit: The maximum number of bytes to allocate; -1 is 99 % of the free memory.

    Raises:
        ValueError: No accelerator of that id can run models; it is also a RuntimeError.
    """

    __module__ = "max.driver"
    __slots__ = ()

    def __new__(cls, id: int = -1, device_memory_limit: int = -1) -> Self:
        if cls is not Accelerator:
            return super().__new__(cls)
        if id < -1:
            raise ValueError(f"Accelerator: id {id} is not a device; expected -1, 0, 1, …")
        position = max(id, 0)
        for provider in _all_providers():
            count = provider.count()
            if position < count:
                opened: Any = provider.open(position, device_memory_limit)
                return opened
            position -= count
        which = "no accelerator" if id < 0 else f"no accelerator with id {id}"
        raise NoAcceleratorError(
            f"Accelerator: {which}: accelerator_count() is {accelerator_count()}, models run on "
            "the CPU here; use CPU()"
        )

    def __init__(self, id: int = -1, device_memory_limit: int = -1) -> None:
        """Does nothing: the provider returns open devices."""

    @property
    def label(self) -> str:
        """Always ``gpu``."""
        return "gpu"

    @property
    def is_host(self) -> bool:
        """Always false: the host accesses its memory by copies."""
        return False

    def can_access(self, other: Device) -> bool:
        """Whether the other device is this one; memory of others is accessed by copies."""
        if not isinstance(other, Device):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"can_access: expected a Device, got {type(other).__name__}")
        return other is self

    def __reduce__(self) -> tuple[Any, ...]:
        return Accelerator, (self.id,)


class AcceleratorProvider(Protocol):
    """One kind of accelerator: the number of its devices, and a function that opens them."""

    def count(self) -> int:
        """The number of devices."""
        ...

    def open(self, index: int, device_memory_limit: int) -> Accelerator:
        """Opens a device; returns the same object at each call, as devices compare by identity.

        Args:
            index: The index among the provider's devices.
            device_memory_limit: As for :class:`Accelerator`.
        """
        ...


_providers: list[AcceleratorProvider] = []
_named_providers: list[str] = []
"""Module and name of the devices of each kind of accelerator that the package has: a module is imported when a program
first asks for accelerators."""


def _all_providers() -> list[AcceleratorProvider]:
    """The kinds of accelerators, those of the package first."""
    while _named_providers:
        module, _, name = _named_providers.pop().partition(":")
        # from the last to the first, each in front: in the order of the list
        _providers.insert(0, getattr(import_module(module), name))
    return _providers


def register_accelerators(provider: AcceleratorProvider) -> None:
    """Registers the devices of a kind. Ids count through all providers in the order of registration.

    Args:
        provider: The devices.
    """
    _providers.append(provider)


def unregister_accelerators(provider: AcceleratorProvider) -> None:
    """Removes a provider's devices; open ones remain usable.

    Args:
        provider: The devices.
    """
    _providers.remove(provider)


def device_named(label: str, id: int) -> Device:
    """The device of a label and id, as types of a graph name it.

    Args:
        label: ``cpu`` or ``gpu``.
        id: The zero-based id.

    Raises:
        ValueError: The machine does not have the device.
    """
    return CPU(id) if label == "cpu" else Accelerator(id)


class DeviceStream:
    """A sequence of operations on a device that run in order.

    On a CPU each operation is complete when its call returns, so that waiting returns at once.

    Args:
        device: The device that the stream is on.
    """

    __module__ = "max.driver"
    __slots__ = ("_device",)

    def __init__(self, device: Device) -> None:
        if not isinstance(device, Device):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"DeviceStream: expected a Device, got {type(device).__name__}")
        self._device = device

    @property
    def device(self) -> Device:
        """The device that the stream is on."""
        return self._device

    @property
    def native_stream_handle(self) -> int:
        """The handle of the platform's stream; 0 on a CPU, which has none."""
        return 0

    def record_event(self) -> DeviceEvent:
        """An event that is ready when all current work on this stream is complete."""
        return DeviceEvent(self._device)

    def synchronize(self) -> None:
        """Returns when all operations on this stream are complete.

        Raises:
            ValueError: A queued operation failed.
        """
        self._device.synchronize()

    def wait_for(
        self,
        stream: DeviceStream | DeviceEvent | Device | None = None,
        device: Device | None = None,
    ) -> None:
        """Orders later work on this stream after all current work on another stream.

        Args:
            stream: The stream or the event to wait for; or a device, for its default stream.
            device: The device whose default stream to wait for.
        """
        sources = [other for other in (stream, device) if other is not None]
        if len(sources) != 1:
            raise TypeError("DeviceStream.wait_for: expected one stream or one device")
        other = sources[0].default_stream if isinstance(sources[0], Device) else sources[0]
        if not isinstance(other, (DeviceStream, DeviceEvent)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "DeviceStream.wait_for: expected a DeviceStream, a DeviceEvent or a Device, got "
                f"{type(other).__name__}"
            )
        other.synchronize()

    def __repr__(self) -> str:
        return f"{self._device.label}[{self._device.id}]"


class DeviceEvent:
    """A point in the work of a device, to wait for.

    Operations on a CPU are complete when their call returns, so that its events are ready at once.

    Args:
        device: The device.
        enable_timing: Whether `elapsed_time` is asked for later; on a CPU it is not available.
    """

    __module__ = "max.driver"
    __slots__ = ("_device",)

    def __init__(self, device: Device, enable_timing: bool = False) -> None:
        if not isinstance(device, Device):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"DeviceEvent: expected a Device, got {type(device).__name__}")
        self._device = device

    def is_ready(self) -> bool:
        """Whether the work before the event is complete."""
        self._device.synchronize()
        return True

    def synchronize(self) -> None:
        """Returns when the work before the event is complete."""
        self._device.synchronize()

    def elapsed_time(self, end: DeviceEvent) -> float:
        """Not available.

        Args:
            end: A later event.

        Raises:
            RuntimeError: Always: devices here keep no times; `max.engine.Model.profile` has those of kernels.
        """
        raise RuntimeError(
            f"DeviceEvent.elapsed_time: {self._device.label}:{self._device.id} keeps no times of events; "
            "Model.profile() has those of kernels"
        )

    def __repr__(self) -> str:
        return f"{self._device.label}[{self._device.id}]:event"


def accelerator_count() -> int:
    """The number of accelerators of all registered kinds; by default 0."""
    return sum(provider.count() for provider in _all_providers())


def accelerator_api() -> str:
    """The API of the accelerator; ``cpu`` without one."""
    return Accelerator().api if accelerator_count() else CPU().api


def accelerator_architecture_name() -> str:
    """The architecture name of the accelerator.

    Raises:
        ValueError: There is no accelerator.
    """
    return Accelerator().architecture_name
