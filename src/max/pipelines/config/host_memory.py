"""The memory of the host that programs can have."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory"]


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that programs can have, with those of cached files; at most what the control group allows. None if unknown.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    available = _field(root / "proc" / "meminfo", "MemAvailable:")
    if available is None:
        return None
    available *= 1024
    group = root / "sys" / "fs" / "cgroup"
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and used is not None:
        cached = _field(group / "memory.stat", "inactive_file") or 0
        available = min(available, max(limit - used + cached, 0))
    return available


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _field(path: Path, name: str) -> int | None:
    """The number after a name in a file of lines."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None
