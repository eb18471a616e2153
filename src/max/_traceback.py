"""Tracebacks that end at the user's line: for errors of the caller, frames of `max` are not shown.

Hooks of `sys` and `threading` remove the frames when an uncaught exception is shown; staging costs nothing more.
``MAX_TRACEBACK=full`` keeps the frames. Errors that can only be bugs of `max`, such as a failed assertion, keep theirs.
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
# subclasses of the above that only bugs raise
_OURS = (RecursionError, UnboundLocalError)


def drop_own_frames(error: BaseException) -> bool:
    """Removes the frames of `max` from an exception's traceback, and from those of its causes.

    Args:
        error: The exception.

    Returns:
        Whether frames were removed.
    """
    trace = error.__traceback__
    if not _is_callers(error, trace):
        return False
    user_entries = _users_frames(trace)
    if not user_entries or len(user_entries) == _length(trace):
        return False
    error.__traceback__ = _chain(user_entries)
    _drop_inner_causes(error)
    return True


def _is_callers(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether an error is one of the caller of `max`, not a bug of `max`."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    if not _is_ours(trace.tb_frame) and not _is_library(trace.tb_frame):
        return True  # a function of the user's that `max` called
    if isinstance(error, AttributeError | ImportError):
        # these two functions report absent names; elsewhere a missing attribute is a bug
        return trace.tb_frame.f_code.co_name in ("lookup", "find_spec")
    return isinstance(error, _CALLERS_MISTAKES) and not isinstance(error, _OURS)


def _users_frames(trace: TracebackType | None) -> list[TracebackType]:
    """The entries that are neither of `max` nor of the libraries that it calls."""
    user_entries: list[TracebackType] = []
    inside = False
    while trace is not None:
        if _is_ours(trace.tb_frame):
            inside = True
        elif not (inside and _is_library(trace.tb_frame)):
            inside = False
            user_entries.append(trace)
        trace = trace.tb_next
    return user_entries


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
    next_entry: TracebackType | None = None
    for entry in reversed(entries):
        next_entry = TracebackType(next_entry, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    assert next_entry is not None
    return next_entry


def _length(trace: TracebackType | None) -> int:
    count = 0
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def _drop_inner_causes(error: BaseException) -> None:
    """Drops the cause of an exception if it never left `max`; else removes frames from its traceback too."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or cause.__traceback__ is None:
        return
    user_entries = _users_frames(cause.__traceback__)
    if not user_entries:
        error.__cause__, error.__suppress_context__ = None, True
        return
    cause.__traceback__ = _chain(user_entries)
    _drop_inner_causes(cause)


def _is_short() -> bool:
    try:
        return flags.MAX_TRACEBACK == "short"
    except FlagError:
        return False


def install() -> None:
    """Installs the hooks, which call those that were installed before."""
    show, show_of_thread = sys.excepthook, threading.excepthook

    def hook(
        exc_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if _is_short() and drop_own_frames(error):
            trace = error.__traceback__
        show(exc_type, error, trace)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is not None and _is_short() and drop_own_frames(error):
            fields = (arguments.exc_type, error, error.__traceback__, arguments.thread)
            arguments = threading.ExceptHookArgs(fields)
        show_of_thread(arguments)

    sys.excepthook, threading.excepthook = hook, thread_hook
    _install_in_notebook()


def _install_in_notebook() -> None:
    """Shortens tracebacks in IPython and Jupyter, which show exceptions of cells themselves.

    A handler that the user has set stays.
    """
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else getattr(ipython, "get_ipython", lambda: None)()
    if shell is None or getattr(shell, "custom_exceptions", None):
        return

    def show(
        shell: Any,
        exc_type: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        tb_offset: int | None = None,
    ) -> None:
        if _is_short() and drop_own_frames(error):
            trace = error.__traceback__
        shell.showtraceback((exc_type, error, trace), tb_offset=tb_offset)

    shell.set_custom_exc((Exception,), show)
