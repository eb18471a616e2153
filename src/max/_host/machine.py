"""The machine: its system and its current boot; the CPUs and the memory that affinity and control groups leave to this
process; sizes in messages. Standard library only.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from max._dataclass import dataclass
from max._host.process_caches import cached_results

LINUX, MACOS, WINDOWS = (sys.platform == name for name in ("linux", "darwin", "win32"))


@cached_results()
def libc() -> ctypes.CDLL:
    """The C library of the process."""
    return ctypes.CDLL(None, use_errno=True)


@cached_results()
def boot_id() -> str | None:
    """An identifier of the current boot of the machine; None on other systems than Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() if LINUX else None
    except OSError:
        return None


def byte_size(count: float) -> str:
    """A number of bytes for a message, in the largest fitting unit: ``1.5 GiB``, ``24 MiB``, ``640 KiB``.

    Args:
        count: The number.
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    text = f"{count:.1f}" if count < 100 else f"{count:.0f}"
    return f"{text.removesuffix('.0')} {units[0]}"


def logical_cpus() -> set[int]:
    """The logical CPUs that the process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def last_level_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache of a core, 0 if they are unknown.

    Args:
        root: Linux' description of the caches.
    """
    sizes = [_read(path / "size") or "" for path in root.glob("index*")]
    return max((int(size[:-1]) << 10 for size in sizes if re.fullmatch(r"\d+K", size)), default=0)


def cgroup_cpu_limit(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> float:
    """CPU limit of the process' control group and its parents; infinity if there is no limit.

    Args:
        root: Mount point of the control groups (v2, or v1 with a ``cpu`` controller below).
        proc: Mount point of procfs.
    """
    limit = math.inf
    for group in _cgroups("cpu", root, proc):
        words = (_read(group / "cpu.max") or "").split()
        if len(words) == 2 and words[0] != "max":
            limit = min(limit, int(words[0]) / int(words[1]))
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            limit = min(limit, int(quota) / int(period))
    return limit


def _cgroups(controller: str, root: Path, proc: Path) -> Iterator[Path]:
    """The folders of the process' control group and of its parents."""
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        # in a container the path may be outside of the mount: then the mount point is the process' group
        folder = base / path.strip("/")
        for group in [folder, *folder.parents]:
            if group != base and base not in group.parents:
                break
            yield group


def _physical(cpus: set[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The number of physical cores of the logical CPUs; the number of CPUs if the platform does not tell."""
    if MACOS:
        size, count = ctypes.c_size_t(4), ctypes.c_int(0)
        libc = ctypes.CDLL(None)
        for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
            if libc.sysctlbyname(name, ctypes.byref(count), ctypes.byref(size), None, 0) == 0:
                return max(1, min(count.value, len(cpus)))
    cores: set[str] = set()
    for cpu in cpus:
        siblings = _read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        cores.add(siblings or f"cpu{cpu}")
    return max(1, len(cores))


def usable_cpus() -> int:
    """The number of physical cores that the process may use, by affinity, SMT siblings and control groups."""
    cores = _physical(logical_cpus())
    limit = cgroup_cpu_limit() if LINUX else math.inf
    return max(1, min(cores, math.ceil(limit) if limit != math.inf else cores))


@dataclass(frozen=True)
class SystemMemory:
    """Memory that the process may use, in bytes; infinity if the platform does not tell."""

    total: float
    available: float


def system_memory(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> SystemMemory:
    """Total and available memory: the least of the machine, the process' control group and its parents.

    The page cache counts as available, as the system reclaims it. Takes about 0.1 ms.

    Args:
        root: Mount point of the control groups (v2, or v1 with a ``memory`` controller below).
        proc: Mount point of procfs.
    """
    total, available = math.inf, math.inf
    if not LINUX:
        return SystemMemory(total, available)
    machine = _numbers(_read(proc / "meminfo"))
    total = min(total, machine.get("MemTotal:", math.inf) * 1024)
    available = min(available, machine.get("MemAvailable:", math.inf) * 1024)
    for group in _cgroups("memory", root, proc):
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit_bytes, used_bytes = _read(group / limit), _read(group / usage)
            # no limit: "max", or a number larger than any memory
            if limit_bytes and used_bytes and limit_bytes.isdigit() and int(limit_bytes) < 1 << 60:
                cached_bytes = _numbers(_read(group / "memory.stat")).get("inactive_file", 0)
                total = min(total, int(limit_bytes))
                available = min(
                    available, max(int(limit_bytes) - int(used_bytes) + cached_bytes, 0)
                )
    return SystemMemory(total, available)


def _numbers(text: str | None) -> dict[str, int]:
    """The numbers of lines of the form `name 123`, by name."""
    rows = [line.split() for line in (text or "").splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def available_memory(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """Available bytes of :func:`system_memory`; None if the platform does not tell.

    Args:
        root: As for :func:`system_memory`.
        proc: As for :func:`system_memory`.
    """
    available = system_memory(root, proc).available
    return None if available == math.inf else int(available)
