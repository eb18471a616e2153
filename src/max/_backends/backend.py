"""What the compiler and the engine need of a device, and the devices of a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from max import kernel as k
from max._dataclass import dataclass
from max._kernel_library.packing import Packing
from max._lazy import lazy_module
from max._runtime.program import NativeArray, Program
from max.driver import Device

if TYPE_CHECKING:
    from max._kernel_library import library as kernel_library
else:
    kernel_library = lazy_module("max._kernel_library.library")

__all__ = ["HOST", "Backend", "BackendOptions", "Backends", "ProgramExecutor"]

HOST = 0
"""The index of the CPU among the backends of a session."""


@dataclass(frozen=True)
class BackendOptions:
    """The options of a session for its backends.

    Args:
        num_threads: The number of CPU workers; None for one a core.
        batch_invariant: Whether kernels sum each row in an order independent of the number of rows.
    """

    num_threads: int | None = None
    batch_invariant: bool = False


class ProgramExecutor(Protocol):
    """A program that is ready to run on a device."""

    @property
    def program(self) -> Program:
        """The program."""
        ...

    @property
    def clock_hz(self) -> float:
        """Ticks a second of the times in `ticks` and `events`."""
        ...

    def run_at(
        self,
        bases: bytes,
        index: NativeArray,
        offsets: NativeArray,
        alone: bool = False,
    ) -> None:
        """Runs the program once with the values ``bases[index] + offsets``; `alone`: there is too little work to share.

        `bases` are words of 64 bits, as `max._runtime.program.packed_words` packs them.

        A device with a queue may return before the launches have run: `Backend.synchronize` waits for them.

        Raises:
            KernelRunError: A kernel raised; a device with a queue may raise it in `Backend.synchronize` instead.
        """
        ...

    def set_profiling(self, on: bool) -> None:
        """Starts or stops keeping the time of each launch."""
        ...

    def ticks(self) -> npt.NDArray[np.int64]:
        """For each launch the ticks at its barrier, the ticks in it, and how often it ran."""
        ...

    def log_events(self, room: int) -> None:
        """Starts a log of single launches with room for that many; 0 stops it."""
        ...

    def events(self) -> npt.NDArray[np.int64]:
        """For each logged launch its number, and the ticks at its barrier, its start and its end."""
        ...


class Backend(ABC):
    """A device as a target of compilation and as a place of execution.

    A session holds one for each device. The compiler takes `target`, `library` and `packing` from it, the engine
    `device` (with its memory), `load`, `executor` and `synchronize`. No code above this package depends on the kind of
    a device.

    Args:
        device: The device of the driver; it owns the memory.
        target: The processor that kernels are compiled for.
        library: Which kernel carries out an op.
        packing: Which weights are laid out anew when a model is loaded.
    """

    def __init__(
        self,
        device: Device,
        target: k.Target,
        library: kernel_library.KernelLibrary,
        packing: Packing,
    ) -> None:
        self.device = device
        self.target = target
        self.library = library
        self.packing = packing

    @property
    def is_host(self) -> bool:
        """Whether the host reads and writes the device's memory, and programs run on the worker pool."""
        return self.device.is_host

    @property
    @abstractmethod
    def queue(self) -> object:
        """The worker pool or the stream that runs the device's programs, one at a time."""

    @property
    def workers(self) -> int:
        """How many workers share the work of a launch; 1 where the device does not say."""
        return 1

    @property
    @abstractmethod
    def cache_key(self) -> str | None:
        """Everything that the code for this device depends on; None if programs must not be kept on disk."""

    @abstractmethod
    def load(self, kernels: Iterable[k.KernelIR]) -> dict[str, int]:
        """Compiles kernels, and gives their entries by key: what `Launch.entry` holds.

        Raises:
            CompileError: The code generator does not take a kernel.
        """

    def start(self, kernel: k.KernelIR) -> None:  # noqa: B027  optional
        """Begins to compile a kernel for a later `load`, if the device compiles on other threads."""

    def cancel_started(self) -> None:  # noqa: B027  optional
        """Drops the kernels that `start` began and that are not loaded."""

    def load_cached(self, keys: Sequence[str]) -> dict[str, int] | None:
        """Entries of kernels of which only the keys are known, from the disk; None if one is absent.

        Args:
            keys: The keys.
        """
        return None if keys else {}

    @abstractmethod
    def executor(self, program: Program) -> ProgramExecutor:
        """Makes a program ready to run."""

    def synchronize(self) -> None:
        """Waits until all launches and copies on the device are complete.

        Raises:
            KernelRunError: A kernel in the queue raised.
        """
        self.device.synchronize()


class Backends:
    """The backends of a session: that of the CPU first, then one for each other device.

    All virtual CPU devices share memory and workers, so one backend stands for all of them. Programs name a backend by
    its index.

    Args:
        host: The backend of the CPU.
        others: The backends of other devices, by label and id.
    """

    def __init__(
        self, host: Backend, others: Mapping[tuple[str, int], Backend] | None = None
    ) -> None:
        others = {} if others is None else others
        self._all: list[Backend] = [host, *others.values()]
        self._index = {name: index for index, name in enumerate(others, 1)}
        self._host_label = host.device.label

    @property
    def host(self) -> Backend:
        """The backend of the CPU."""
        return self._all[HOST]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._all)

    def __getitem__(self, index: int) -> Backend:
        return self._all[index]

    def index(self, device: tuple[str, int]) -> int:
        """The index of the backend of a device.

        Args:
            device: Its label and id.

        Raises:
            ValueError: The session does not have the device.
        """
        if device[0] == self._host_label:
            return HOST
        index = self._index.get(device)
        if index is None:
            names = ", ".join(["cpu", *(f"{label}:{id}" for label, id in self._index)])
            raise ValueError(
                f"the graph uses {device[0]}:{device[1]}, the session has {names}; "
                "give the device to InferenceSession(devices=...)"
            )
        return index

    def cache_key(self) -> str | None:
        """The keys of all backends; None if the programs of one must not be kept on disk."""
        keys = [backend.cache_key for backend in self._all]
        cache_keys = [key for key in keys if key is not None]
        return "\n".join(cache_keys) if len(cache_keys) == len(keys) else None
