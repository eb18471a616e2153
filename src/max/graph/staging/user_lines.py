"""The lines of the user's program at which ops are staged."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from max import mlir
from max._host.process_caches import cached_results

__all__ = ["location_at", "user_frame", "user_place"]

_STAGING = tuple(
    [
        str(Path(__file__).parents[2] / name)
        for name in ("graph", "nn", "experimental", "_names.py", "_host")
    ]
)
"""Packages, and files of functions that call others, whose frames are skipped when an op's location is recorded."""


@cached_results(65536)
def location_at(filename: str, line: int, scope: str = "") -> mlir.LocationAttr:
    """The location attribute of a file and a line, and the names of `Graph.profile_scope` around it."""
    return mlir.line_location(filename, line, scope)


def user_place() -> tuple[str, int]:
    """File and line of the innermost frame outside of `_STAGING`."""
    frame, _ = user_frame(2)
    return frame.f_code.co_filename, frame.f_lineno


def user_frame(depth: int = 1) -> tuple[FrameType, int]:
    """The innermost frame outside of `_STAGING`, and the number of frames from it to the caller of this function.

    Args:
        depth: The frame to begin with; 1 is that of the caller.
    """
    frame = sys._getframe(depth)  # pyright: ignore[reportPrivateUsage]
    depth -= 1
    while frame.f_code.co_filename.startswith(_STAGING) and frame.f_back is not None:
        frame = frame.f_back
        depth += 1
    return frame, depth
