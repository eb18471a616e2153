"""What native code needs of the operating system and the processor family. `max._host` has what all layers need of
them, `max.kernel.targets.host` the features of the CPU.

This module provides the LLVM code model for the platform's linker, the permission for AMX, and the primitives of native
code (pause, yield, park, wake, clock) as LLVM IR, with the addresses of the functions that they call.
"""

from __future__ import annotations

import ctypes
import platform as _host
import sys

from max._abi import PARKING_BYTES
from max._config import flags
from max._dataclass import dataclass
from max._host.machine import LINUX, WINDOWS, libc, usable_cpus
from max._host.process_caches import cached_results

_ARCHITECTURES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
MACHINE = _ARCHITECTURES.get(_host.machine().lower(), _host.machine().lower())

# system call numbers by architecture: futex, and arch_prctl where it exists
_FUTEX = {"x86_64": 202, "aarch64": 98}
_ARCH_PRCTL_X86_64 = 158
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18


def default_num_threads() -> int:
    """``MAX_NUM_THREADS``, or one worker per usable core."""
    return flags.MAX_NUM_THREADS or usable_cpus()


# LLVM --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeModel:
    """LLVM's code model, relocation model and linker for the process."""

    model: str
    reloc: str
    jitlink: bool


def code_model(triple: str) -> CodeModel:
    """The code model and linker that work for a target triple."""
    arch = triple.split("-", 1)[0]
    if "windows" in triple:
        # COFF: the small model cannot reach the process' own symbols, and JITLink has no GOT for it
        return CodeModel("jitdefault", "default", False)
    if arch in ("x86_64", "aarch64", "arm64"):
        return CodeModel("small", "pic", True)
    return CodeModel("jitdefault", "default", False)


@cached_results()
def request_amx() -> bool:
    """Requests the AMX tile registers from the system, once per process; returns whether they may be used.

    Without this permission the first tile instruction kills the process.
    """
    if not LINUX or MACHINE != "x86_64":
        return False
    syscall = libc().syscall
    syscall.restype = ctypes.c_long
    granted = syscall(
        ctypes.c_long(_ARCH_PRCTL_X86_64),
        ctypes.c_long(_ARCH_REQ_XCOMP_PERM),
        ctypes.c_long(_XFEATURE_XTILEDATA),
    )
    return granted == 0


# Primitives of native code -----------------------------------------------------------------------


@dataclass(frozen=True)
class Primitives:
    """The platform's primitives for the native code of the pool.

    ``ir`` defines ``@max_pause()``, ``@max_yield()``, ``@max_park(ptr pool, ptr word, i32 old)``
    (sleep while the word has that value; may return early), ``@max_wake(ptr pool, ptr word)`` (wake
    all sleepers on the word), ``i64 @max_clock()`` (monotonic, in ``1 / clock_hz`` seconds) and
    ``i64 @max_self()`` (the calling thread, as ``threading.get_ident`` has it).
    ``symbols`` has the addresses of the system functions that the IR declares.
    """

    parking: str
    ir: str
    symbols: dict[str, int]
    clock_hz: int


# offsets of the mutex and the condition variable in the parking area of the pool's struct
MUTEX_OFFSET, CONDITION_OFFSET = 0, PARKING_BYTES // 2

_PAUSE = {
    "x86_64": (
        "declare void @llvm.x86.sse2.pause()",
        "call void @llvm.x86.sse2.pause()",
    ),
    "aarch64": (
        "declare void @llvm.aarch64.hint(i32)",
        "call void @llvm.aarch64.hint(i32 1)",
    ),
}

# system functions by parking mode and library (None: the process itself)
_FUNCTIONS: dict[str, dict[str | None, tuple[str, ...]]] = {
    "futex": {None: ("sched_yield", "clock_gettime", "pthread_self", "syscall")},
    "pthread": {
        None: (
            "sched_yield",
            "clock_gettime",
            "pthread_self",
            "pthread_mutex_lock",
            "pthread_mutex_unlock",
            "pthread_cond_wait",
            "pthread_cond_broadcast",
        )
    },
    "address": {
        "api-ms-win-core-synch-l1-2-0.dll": ("WaitOnAddress", "WakeByAddressAll"),
        "kernel32.dll": ("SwitchToThread", "QueryPerformanceCounter", "GetCurrentThreadId"),
    },
}

_PTHREAD_PARKING = """
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_broadcast(ptr)

define internal void @max_park(ptr %pool, ptr %word, i32 %old) noinline {{
entry:
  %area = getelementptr i8, ptr %pool, i64 {parking}
  %mutex = getelementptr i8, ptr %area, i64 {mutex}
  %condition = getelementptr i8, ptr %area, i64 {condition}
  %locked = call i32 @pthread_mutex_lock(ptr %mutex)
  %now = load atomic i32, ptr %word seq_cst, align 4
  %same = icmp eq i32 %now, %old
  br i1 %same, label %wait, label %leave
wait:
  %waited = call i32 @pthread_cond_wait(ptr %condition, ptr %mutex)
  br label %leave
leave:
  %unlocked = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret void
}}

define internal void @max_wake(ptr %pool, ptr %word) noinline {{
  %area = getelementptr i8, ptr %pool, i64 {parking}
  %mutex = getelementptr i8, ptr %area, i64 {mutex}
  %condition = getelementptr i8, ptr %area, i64 {condition}
  %locked = call i32 @pthread_mutex_lock(ptr %mutex)
  %woken = call i32 @pthread_cond_broadcast(ptr %condition)
  %unlocked = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret void
}}
"""

_FUTEX_PARKING = """
declare i64 @syscall(i64, ...)

define internal void @max_park(ptr %pool, ptr %word, i32 %old) noinline {{
  %value = zext i32 %old to i64
  %result = call i64 (i64, ...) @syscall(i64 {number}, ptr %word, i64 128, i64 %value, ptr null)
  ret void
}}

define internal void @max_wake(ptr %pool, ptr %word) noinline {{
  %result = call i64 (i64, ...) @syscall(i64 {number}, ptr %word, i64 129, i64 2147483647)
  ret void
}}
"""

_WINDOWS_PARKING = """
declare i32 @WaitOnAddress(ptr, ptr, i64, i32)
declare void @WakeByAddressAll(ptr)

define internal void @max_park(ptr %pool, ptr %word, i32 %old) noinline {
  %compare = alloca i32, align 4
  store i32 %old, ptr %compare, align 4
  %result = call i32 @WaitOnAddress(ptr %word, ptr %compare, i64 4, i32 -1)
  ret void
}

define internal void @max_wake(ptr %pool, ptr %word) noinline {
  call void @WakeByAddressAll(ptr %word)
  ret void
}
"""

_POSIX_CLOCK = """
declare i32 @sched_yield()
declare i32 @clock_gettime(i32, ptr)
declare i64 @pthread_self()

define internal i64 @max_self() noinline {{
  %self = call i64 @pthread_self()
  ret i64 %self
}}

define internal void @max_yield() noinline {{
  %result = call i32 @sched_yield()
  ret void
}}

define internal i64 @max_clock() noinline {{
  %time = alloca {{ i64, i64 }}, align 8
  %result = call i32 @clock_gettime(i32 {clock}, ptr %time)
  %seconds = load i64, ptr %time, align 8
  %rest = getelementptr i8, ptr %time, i64 8
  %nanoseconds = load i64, ptr %rest, align 8
  %scaled = mul i64 %seconds, 1000000000
  %sum = add i64 %scaled, %nanoseconds
  ret i64 %sum
}}
"""

_WINDOWS_CLOCK = """
declare i32 @SwitchToThread()
declare i32 @QueryPerformanceCounter(ptr)
declare i32 @GetCurrentThreadId()

define internal i64 @max_self() noinline {
  %id = call i32 @GetCurrentThreadId()
  %self = zext i32 %id to i64
  ret i64 %self
}

define internal void @max_yield() noinline {
  %result = call i32 @SwitchToThread()
  ret void
}

define internal i64 @max_clock() noinline {
  %time = alloca i64, align 8
  %result = call i32 @QueryPerformanceCounter(ptr %time)
  %ticks = load i64, ptr %time, align 8
  ret i64 %ticks
}
"""


def parking_mode(chosen_mode: str | None = None) -> str:
    """How idle workers sleep here: ``futex``, ``pthread`` or ``address`` (Windows).

    Args:
        chosen_mode: ``auto``, ``futex`` or ``portable``; default: ``MAX_PARKING``.

    Raises:
        ValueError: ``futex`` was requested on a platform without futexes.
    """
    chosen_mode = flags.MAX_PARKING if chosen_mode is None else chosen_mode
    has_futex = LINUX and MACHINE in _FUTEX
    if chosen_mode == "futex" and not has_futex:
        raise ValueError(
            f"MAX_PARKING=futex needs Linux on x86_64 or aarch64, this is {sys.platform} on "
            f"{MACHINE}; auto or portable would fit"
        )
    if WINDOWS:
        return "address"
    return "futex" if has_futex and chosen_mode != "portable" else "pthread"


def primitives_ir(system: str, machine: str, mode: str, parking_offset: int) -> str:
    """The LLVM IR of the primitives for any platform.

    Args:
        system: As in ``sys.platform``.
        machine: LLVM's name of the architecture.
        mode: A result of :func:`parking_mode`.
        parking_offset: The offset of the parking area (`max._abi.PARKING_BYTES`) in the pool's struct.
    """
    declare, call = _PAUSE.get(machine, ("", ""))
    body = f"{{\n  {call}\n  ret void\n}}\n"
    pause = f"{declare}\n\ndefine internal void @max_pause() noinline {body}"
    if mode == "address":
        return pause + _WINDOWS_PARKING + _WINDOWS_CLOCK
    if mode == "futex":
        parking = _FUTEX_PARKING.format(number=_FUTEX[machine])
    else:
        parking = _PTHREAD_PARKING.format(
            parking=parking_offset, mutex=MUTEX_OFFSET, condition=CONDITION_OFFSET
        )
    # CLOCK_MONOTONIC
    return pause + parking + _POSIX_CLOCK.format(clock=6 if system == "darwin" else 1)


def _symbols(mode: str) -> dict[str, int]:
    """Addresses of the system functions that the primitives declare."""
    libraries = {name: library for library, names in _FUNCTIONS[mode].items() for name in names}
    addresses: dict[str, int] = {}
    for name, library in libraries.items():
        handle = ctypes.CDLL(library) if library else libc()
        address = ctypes.cast(getattr(handle, name), ctypes.c_void_p).value
        if address is None:
            raise OSError(f"the system library has no function {name}")
        addresses[name] = address
    return addresses


def _clock_hz() -> int:
    if not WINDOWS:
        return 1_000_000_000
    frequency = ctypes.c_int64(0)
    ctypes.CDLL("kernel32.dll").QueryPerformanceFrequency(ctypes.byref(frequency))
    return frequency.value


def primitives(parking_offset: int, mode: str) -> Primitives:
    """The primitives for this machine; the arguments as in :func:`primitives_ir`."""
    ir = primitives_ir(sys.platform, MACHINE, mode, parking_offset)
    return Primitives(mode, ir, _symbols(mode), _clock_hz())


def init_parking(address: int, mode: str) -> None:
    """Initializes the mutex and the condition variable of the portable parking."""
    if mode != "pthread":
        return
    library = libc()
    for function, offset in (
        (library.pthread_mutex_init, MUTEX_OFFSET),
        (library.pthread_cond_init, CONDITION_OFFSET),
    ):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        if error := function(address + offset, None):
            raise OSError(error, f"{function.__name__} failed")
