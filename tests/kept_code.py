"""Machine code of kernels that runs of the suite keep for the next one, with ``--keep-code``.

LLVM takes a quarter of the suite's CPU time, for kernels that are mostly those of the last run. As in users' caches
their keys have all that the code depends on; here the sources of the code generator are part of it by their content,
so that an edit of LLVM's passes, too, compiles all kernels anew. Programs and measurements are never kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".pytest_cache" / "kernels"
SOURCES = ("_abi.py", "kernel", "_backends/cpu/runtime")
"""What turns a kernel's function into machine code, below ``src/max``."""
GENERATORS = 3
"""How many code generators keep their code: those used last, for the branches of a checkout."""
UNUSED_DAYS = 7
"""Code that no run has used for so long is deleted; a read updates its time, once an hour."""


def sources(root: Path) -> Iterable[Path]:
    """The files of the code generator of a checkout."""
    for name in SOURCES:
        path = root / "src" / "max" / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def generator(root: Path = ROOT) -> str:
    """A digest of the code generator."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sources(root):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root)}:{len(text)};".encode() + text)
    return digest.hexdigest()


def keep_code(cache: Path, kept: Path = FOLDER, name: str | None = None) -> Path:
    """Makes a new cache folder take the code of kernels from what earlier runs kept, and keep it there.

    Args:
        cache: The cache folder of the run; several processes may share it.
        kept: Where code is kept, a folder for each code generator.
        name: The code generator; this one if not given.

    Returns:
        The folder of the code.
    """
    folder = kept / (generator() if name is None else name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(folder)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another worker was first
        (cache / "object").symlink_to(folder, target_is_directory=True)
    prune(kept)
    return folder


def prune(kept: Path) -> None:
    """Deletes what earlier code generators left, and what is not used any more."""
    for other in sorted(kept.iterdir(), key=lambda path: -path.stat().st_mtime)[GENERATORS:]:
        shutil.rmtree(other, ignore_errors=True)
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in kept.rglob("*"):
        with contextlib.suppress(OSError):  # another worker deletes it, too
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()
