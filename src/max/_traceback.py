"""Tracebacks that end at the user's line: frames of `max` are not shown for errors that are the caller's.

A hook of `sys` and `threading` takes the frames out when an exception that nobody caught is shown; staging pays
nothing. ``MAX_TRACEBACK=full`` keeps them, and so do errors that can only be ours, such as a failed assertion.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from max._config import FlagError, flags

_PACKAGE = os.path.dirname(__file__) + os.sep
_STANDARD = ("<frozen", os.path.dirname(os.__file__) + os.sep)
_SITES = ("site-packages", "dist-packages")
_DEPENDENCIES = tuple(
    f"{site}{os.sep}{name}{os.sep}"
    for site in _SITES
    for name in (
        "numpy",
        "ml_dtypes",
        "llvmlite",
        "xdsl",
        "safetensors",
        "huggingface_hub",
        "jinja2",
    )
)
_CALLERS_MISTAKES = (
    ValueError,
    TypeError,
    IndexError,
    NotImplementedError,
    RuntimeError,
)
# bugs show themselves as these
_OURS = (RecursionError, UnboundLocalError)


def filtered(error: BaseException) -> bool:
    """Takes the frames of `max` out of an exception's traceback, and out of those of its causes.

    Args:
        error: The exception.

    Returns:
        Whether anything was taken out.
    """
    trace = error.__traceback__
    if not _is_callers(error, trace):
        return False
    kept = _users_frames(trace)
    if not kept or len(kept) == _length(trace):
        return False
    error.__traceback__ = _chain(kept)
    _drop_inner_causes(error)
    return True


def _is_callers(error: BaseException, trace: TracebackType | None) -> bool:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    if not _is_ours(trace.tb_frame) and not _is_library(trace.tb_frame):
        return True  # a function of the user's that `max` called
    if isinstance(error, AttributeError | ImportError):
        # of names that a module has not; an attribute that our code takes of a None is a bug
        return trace.tb_frame.f_code.co_name in ("lookup", "find_spec")
    return isinstance(error, _CALLERS_MISTAKES) and not isinstance(error, _OURS)


def _users_frames(trace: TracebackType | None) -> list[TracebackType]:
    """The entries that are neither of `max` nor of what it calls."""
    kept: list[TracebackType] = []
    inside = False
    while trace is not None:
        if _is_ours(trace.tb_frame):
            inside = True
        elif not (inside and _is_library(trace.tb_frame)):
            inside = False
            kept.append(trace)
        trace = trace.tb_next
    return kept


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_library(frame: FrameType) -> bool:
    """Whether a frame below one of `max` is of the standard library, or of a package that `max` depends on.

    Other packages are the user's: their layers are called from layers of `max`.
    """
    name = frame.f_code.co_filename
    if any(site in name for site in _SITES):
        return any(package in name for package in _DEPENDENCIES)
    return name.startswith(_STANDARD)


def _chain(entries: list[TracebackType]) -> TracebackType:
    following: TracebackType | None = None
    for entry in reversed(entries):
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    assert following is not None
    return following


def _length(trace: TracebackType | None) -> int:
    count = 0
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def _drop_inner_causes(error: BaseException) -> None:
    """Drops what an exception was raised from, where that never left `max`; else takes frames out of it too."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or cause.__traceback__ is None:
        return
    kept = _users_frames(cause.__traceback__)
    if not kept:
        error.__cause__, error.__suppress_context__ = None, True
        return
    cause.__traceback__ = _chain(kept)
    _drop_inner_causes(cause)


def _wanted() -> bool:
    try:
        return flags.MAX_TRACEBACK == "short"
    except FlagError:
        return False


def install() -> None:
    """Sets the hooks in front of those that are there."""
    show, show_of_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _wanted() and filtered(error):
            trace = error.__traceback__
        show(kind, error, trace)

    def thread_hook(arguments: Any) -> None:
        error = arguments.exc_value
        if error is not None and _wanted() and filtered(error):
            fields = (arguments.exc_type, error, error.__traceback__, arguments.thread)
            arguments = threading.ExceptHookArgs(fields)
        show_of_thread(arguments)

    sys.excepthook, threading.excepthook = hook, thread_hook
