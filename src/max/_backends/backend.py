"""What the compiler and the engine need of a device, and the devices of a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from max import kernel as k
from max._backends.program import NativeArray, PartJump, Program
from max._backends.regions import RegionKernel, RegionSpec
from max._dataclass import dataclass
from max._lazy import lazy_module
from max.driver import Device
from max.dtype import DType

if TYPE_CHECKING:
    from xdsl.ir import Block, Operation

    from max._backends import kernel_library, loops
else:
    kernel_library = lazy_module("max._backends.kernel_library")
    loops = lazy_module("max._backends.loops")

__all__ = [
    "HOST",
    "SAMPLING_OPS",
    "Backend",
    "BackendOptions",
    "BackendPass",
    "Backends",
    "MemoryBlock",
    "PassPlace",
    "ProgramExecutor",
    "Rate",
    "RunsHere",
    "SharedBlock",
    "Sharing",
    "Tuning",
]

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
    def runs(self) -> int:
        """How many runs began."""
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

        `bases` are words of 64 bits, as `max._backends.program.packed_words` packs them.

        A device with a queue may return before the launches have run: `Backend.synchronize` waits for them.

        Raises:
            KernelRunError: A kernel raised; a device with a queue may raise it in `Backend.synchronize` instead.
        """
        ...

    def set_addend(self, launch: int, slot: int, addend: int) -> None:
        """Replaces the constant of a slot, from the next run on: a row threshold that was measured."""
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


PassPlace = Literal["weights", "regions"]
"""The places of a backend's passes: ``weights``, before computation on weights is moved to load; ``regions``, before
ops become regions, where views that no strides describe are copies already."""
RunsHere = Callable[["Operation"], bool]
"""Whether an op runs on the backend of a pass."""


@dataclass(frozen=True)
class BackendPass:
    """A pass of a backend over a block of a graph. It leaves the ops of other devices as they are.

    Args:
        name: Its name in dumps.
        function: Changes a block in place.
    """

    name: str
    function: Callable[[Block, RunsHere], object]


class MemoryBlock(NamedTuple):
    """A block of a device's memory."""

    address: int
    owner: object
    """Keeps the block alive."""


class SharedBlock(NamedTuple):
    """A block of memory that the host and the programs of a device access at the same time."""

    address: int
    """For the device's programs."""
    array: npt.NDArray[np.uint8]
    """For the host: the same bytes, without waiting for the device."""
    owner: object
    """Keeps the block alive."""


SAMPLING_OPS = ("mo.sample.token", "mo.penalties")
"""The ops that choose tokens from logits: see `Backend.samples`."""


class Rate(NamedTuple):
    """How long one worker needs for an amount of work."""

    unshared_amount: int
    """The amount up to which a launch is not worth sharing, however many launches there are."""
    weight: int
    """The time of each further element, operation or byte."""


@dataclass(frozen=True)
class Sharing:
    """When an execution has so little work that one worker is faster alone.

    Args:
        rates: The rate of each kind of work: ``region`` (elements), ``product`` (operations), ``other`` (bytes).
        most_work: The most work of such an execution, in the unit of `Rate.weight`.
    """

    rates: Mapping[str, Rate]
    most_work: int


@dataclass(frozen=True)
class Tuning:
    """How row thresholds between the paths of a product are measured while a device is idle.

    Args:
        least_bytes: The minimum size of the weights of measured launches; the time of smaller ones hardly matters.
        sample_bytes: The approximate size of the weights that a measurement reads: more than the caches, as a step
            reads each weight once.
        most_rows: The greatest number of rows that is measured.
    """

    least_bytes: int
    sample_bytes: int
    most_rows: int


class Backend(ABC):
    """A device as a target of compilation and as a place of execution.

    A session holds one for each device. The compiler takes `target`, `library`, `passes` and `write_region` from it,
    the engine `device`, `allocate`, `load`, `executor` and `synchronize`. Neither depends on the kind of a device.

    Args:
        device: The device of the driver; it owns the memory.
        target: The processor that kernels are compiled for.
        library: Which kernel carries out an op.
    """

    def __init__(
        self,
        device: Device,
        target: k.Target,
        library: kernel_library.KernelLibrary,
    ) -> None:
        self.device = device
        self.target = target
        self.library = library

    shares_host_memory: bool = False
    """Whether the device's programs use the memory of the host: weights and inputs are then read in place."""
    is_asynchronous: bool = True
    """Whether `ProgramExecutor.run_at` may return before the launches have run."""
    runs_jumps: bool = False
    """Whether executors carry out branches and loops (`Jump`). Otherwise programs are cut there, and the host decides
    where they continue."""
    sharing: Sharing | None = None
    """When one worker runs an execution alone; None: never."""
    tuning: Tuning | None = None
    """How row thresholds are measured; None: launches keep those of the kernel library."""

    def holds(self, device: Device) -> bool:
        """Whether the programs of this backend use the memory of a device of the driver."""
        return device is self.device

    def allocate(
        self, num_bytes: int, holes: Sequence[int] = (), zero: bool = False
    ) -> MemoryBlock:
        """Allocates memory for programs: arenas, and the operands of measurements.

        Args:
            num_bytes: The size.
            holes: The offsets of pages that no program may touch; a device without guard pages ignores them.
            zero: Whether all bytes are 0.

        Raises:
            MemoryError: The device is out of memory.
        """
        block = self.device.memory.allocate("arena", DType.uint8, (num_bytes,), zero)
        return MemoryBlock(block.ptr, block.owner)

    def share(self, num_bytes: int) -> SharedBlock | None:
        """Allocates zeroed memory that the host reads and writes while programs of the device run on it.

        In it a text model that decodes several steps in one call delivers their tokens, and reads whether the host
        interrupts it.

        Args:
            num_bytes: The size.

        Returns:
            The memory; None if the device has none of this kind, so that the host drives each step.
        """
        if not self.shares_host_memory:
            return None
        array = np.zeros(num_bytes, np.uint8)
        return SharedBlock(array.ctypes.data, array, array)

    @property
    def has_loop(self) -> bool:
        """Whether `loop` makes loops over two programs; by default if `runs_jumps`."""
        return self.runs_jumps

    def loop(self, body: Program, after: Program) -> ProgramExecutor:
        """Makes a loop ready to run: two programs in turn until a byte is 0, at least once.

        Both have loaded kernels, and share an arena. By default they are joined into one program, with jumps.

        Args:
            body: The first program of each turn.
            after: The second one; it writes the byte.

        Returns:
            The values of a run are those of `body`, then those of `after`, then the address of the byte.
        """
        return self.executor(loops.looped_program(body, after))

    def join(
        self, parts: Sequence[Program], jumps: Sequence[PartJump], num_flags: int
    ) -> ProgramExecutor:
        """Makes programs ready to run in order, with jumps between them; for devices with `runs_jumps`.

        Args:
            parts: The programs, with loaded kernels; they share an arena.
            jumps: The jumps between them.
            num_flags: The number of bytes that jumps depend on.

        Returns:
            The values of a run are those of the parts in order, then the addresses of the bytes.
        """
        return self.executor(loops.joined_program(parts, jumps, num_flags))

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled on the device: by default, if the library has the ops of `SAMPLING_OPS`.

        Otherwise logits are copied to the host, which samples them.
        """
        return all(map(self.library.supports, SAMPLING_OPS))

    @property
    @abstractmethod
    def queue(self) -> object:
        """The worker pool or the stream that runs the device's programs, one at a time."""

    @property
    def workers(self) -> int:
        """How many workers share the work of a launch; 1 where the device does not say."""
        return 1

    def run_number(self) -> int:
        """A number that changes with each run, and is odd during a run; for devices with a `tuning`."""
        return 0

    @property
    @abstractmethod
    def cache_key(self) -> str | None:
        """Everything that the code for this device depends on; None if programs must not be kept on disk."""

    @abstractmethod
    def load(self, kernels: Iterable[k.KernelIR]) -> dict[str, int]:
        """Compiles kernels, and gives the numbers by which launches name them (`Launch.kernel`), by key.

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

    def passes(self, place: PassPlace) -> Sequence[BackendPass]:
        """The backend's own passes at a place of `max._compiler.pipeline.PASSES`: packing, layout, merging.

        Args:
            place: The place.
        """
        return ()

    @abstractmethod
    def write_region(self, spec: RegionSpec) -> RegionKernel:
        """Writes the kernel of a fused region.

        Args:
            spec: The region.
        """

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
        # by label only: virtual CPUs have ids, and share one backend
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

    def of(self, device: Device) -> Backend:
        """The backend of a device.

        Args:
            device: A device of the session.

        Raises:
            ValueError: The session does not have the device.
        """
        return self._all[self.index((device.label, device.id))]

    def cache_key(self) -> str | None:
        """The keys of all backends; None if the programs of one must not be kept on disk."""
        keys = [backend.cache_key for backend in self._all]
        cache_keys = [key for key in keys if key is not None]
        return "\n".join(cache_keys) if len(cache_keys) == len(keys) else None
