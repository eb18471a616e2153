"""The debugging options of a process: `InferenceSession.debug`, and ``MODULAR_DEBUG``."""

from __future__ import annotations

import faulthandler
import functools
import logging
import weakref
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from max._config import flags
from max._errors import ArgumentError
from max._spelling import did_you_mean
from max.engine._options import LEVELS
from max.graph import Graph, print_options

__all__ = ["CompilationStopped", "DebugConfig", "PrintStyle", "current"]

_T = TypeVar("_T")
_log = logging.getLogger("max.engine")


class PrintStyle(Enum):
    """How `max.graph.ops.print` shows tensors; see `InferenceSession.set_debug_print_options`."""

    __module__ = "max.engine"

    COMPACT = 0
    FULL = 1
    BINARY = 2
    NONE = 3
    BINARY_MAX_CHECKPOINT = 4


class CompilationStopped(RuntimeError):
    """A compilation ended on request. It is never raised here: `DebugConfig.pre_jit` is an error."""

    __module__ = "max.engine"


class _Option(Generic[_T]):
    """An option of one type; what it does is in `apply` of its name, if there is such a method."""

    def __init__(self, cls: type[_T], default: _T, doc: str, choices: tuple[str, ...] = ()) -> None:
        self.kind, self.default, self.choices, self.__doc__ = cls, default, choices, doc
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> _Option[_T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> _T: ...
    def __get__(self, instance: Any, owner: type | None = None) -> _Option[_T] | _T:
        if instance is None:
            return self
        # a setting that lives elsewhere is read there
        read = getattr(instance, f"_read_{self.name}", None)
        return instance._values[self.name] if read is None else read()

    def __set__(self, instance: Any, value: _T) -> None:
        if type(value) is not self.kind:
            raise TypeError(f"debug.{self.name} is {value!r}, expected a {self.kind.__name__}")
        if self.choices and str(value).lower() not in self.choices:
            hint = did_you_mean(str(value).lower(), self.choices)
            choices = ", ".join(map(repr, self.choices))
            raise ArgumentError(f"debug.{self.name} is {value!r}, expected one of {choices}{hint}")
        # first: an option that cannot be obeyed raises, and keeps its value
        apply = getattr(instance, f"_apply_{self.name}", None)
        if apply is not None:
            apply(value)
        instance._values[self.name] = value


class DebugConfig:
    """Debugging options of the process, as attributes.

    ``MODULAR_DEBUG`` sets them too: names with dashes, separated by commas, such as ``nan-check,op-log-level=info``;
    ``sensible`` is `sensible_mode`. It is read when the first session is made.
    """

    __module__ = "max.engine"

    nan_check = _Option(
        bool, False,
        "Whether models that are loaded from now on raise a ValueError, which is a FloatingPointError, at the first op "
        "whose result has a NaN. They run on the NumPy interpreter, op by op.",
    )  # fmt: skip
    assert_level = _Option(
        str, "", "Which asserts kernels keep. They check their inputs at all levels.",
        ("", "none", "warn", "safe", "all"),
    )  # fmt: skip
    device_sync_mode = _Option(
        bool, False, "Whether operations of GPUs are awaited one by one. On CPUs they are complete when they return."
    )  # fmt: skip
    ir_output_dir = _Option(
        str, "", "The folder to which loading a graph writes its module, as ``<name of the graph>.mlir``."
    )  # fmt: skip
    op_log_level = _Option(
        str, "", "The level of the logger ``max.kernel``, as `InferenceSession.set_mojo_log_level`.",
        ("", *LEVELS),
    )  # fmt: skip
    pre_jit = _Option(
        bool, False, "Whether compilation ends before machine code is made. True is an error."
    )
    print_style = _Option(
        PrintStyle, PrintStyle.NONE,
        "The style of printed tensors in all sessions. Until it is set, each session has its own.",
    )  # fmt: skip
    sensible_mode = _Option(
        bool, False,
        "True sets `nan_check`, `assert_level`, `device_sync_mode`, `source_tracebacks` and both stack traces.",
    )  # fmt: skip
    source_tracebacks = _Option(
        bool, False, "Whether ops keep the line that staged them, which they always do; see `Graph.debug`."
    )  # fmt: skip
    stack_trace_on_crash = _Option(
        bool, False, "Whether Python's stacks are shown if the process crashes (`faulthandler`)."
    )
    stack_trace_on_error = _Option(
        bool, False, "Whether tracebacks of errors show the frames of `max` too, as with ``MAX_TRACEBACK=full``."
    )  # fmt: skip
    uninitialized_read_check = _Option(
        bool, False, "Whether reads of memory that nothing wrote are found. True is an error."
    )
    uninitialized_read_mode = _Option(
        str, "", "What `uninitialized_read_check` does.", ("", "abort", "report")
    )

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._printing: weakref.WeakSet[print_options.PrintOptions] = weakref.WeakSet()
        self._full_tracebacks: Any = None
        self._enabled_faults = False
        self.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not isinstance(getattr(type(self), name, None), _Option):
            hint = did_you_mean(name, _options())
            raise AttributeError(f"DebugConfig has no option {name!r}{hint}")
        super().__setattr__(name, value)

    def reset(self) -> None:
        """Sets all options to their defaults."""
        for name, option in _options().items():
            changed = name in self._values and getattr(self, name) != option.default
            self._values[name] = option.default
            # by assignment, which undoes what the last value did
            if changed:
                setattr(self, name, option.default)
        for options in self._printing:
            options.style = "COMPACT"

    def take(self, text: str) -> None:
        """Sets options from a text as in ``MODULAR_DEBUG``.

        Args:
            text: The text.

        Raises:
            ValueError: An option does not take the value, or cannot be obeyed.
        """
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = item.partition("=")
            name = "sensible_mode" if key == "sensible" else key.replace("-", "_")
            # names have dashes there
            option = _options().get(name) if "_" not in key else None
            if option is None:
                hint = did_you_mean(key, [each.replace("_", "-") for each in _options()])
                _log.warning("MODULAR_DEBUG: unknown option %r; ignoring%s", key, hint)
                continue
            try:
                setattr(self, name, _parse_value(option, value if equals else None))
            except (ValueError, TypeError, NotImplementedError) as error:
                raise ValueError(f"MODULAR_DEBUG={text}: {error}") from error

    def printing(self) -> print_options.PrintOptions:
        """The options of a new session's printed tensors."""
        options = print_options.PrintOptions()
        if self.print_style is not PrintStyle.NONE:
            options.style = self.print_style.name
        self._printing.add(options)
        return options

    def write_module(self, name: str, text: str) -> None:
        """Writes the module of a loaded graph to `ir_output_dir`."""
        folder = Path(self.ir_output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name.replace('/', '_')}.mlir").write_text(text + "\n")

    def _apply_op_log_level(self, value: str) -> None:
        level = LEVELS[value.lower()] if value else logging.NOTSET
        logging.getLogger("max.kernel").setLevel(level)

    def _apply_pre_jit(self, value: bool) -> None:
        if value:
            raise NotImplementedError(
                "debug.pre_jit: a compilation cannot be stopped here; ir_output_dir or MAX_DUMP=passes show its stages"
            )

    def _apply_uninitialized_read_check(self, value: bool) -> None:
        if value:
            raise NotImplementedError(
                "debug.uninitialized_read_check: reads are not tracked here; MAX_GUARD=1 fills memory with a pattern, "
                "and MAX_KERNEL_CHECK=2 checks addresses"
            )

    def _apply_print_style(self, value: PrintStyle) -> None:
        if value.name.startswith("BINARY"):
            raise ArgumentError(
                f"debug.print_style: {value.name} needs a folder; use InferenceSession.set_debug_print_options"
            )
        for options in self._printing:
            options.style = value.name

    def _apply_sensible_mode(self, value: bool) -> None:
        if value:
            self.assert_level = "all"
            for name in ("nan_check", "device_sync_mode", "source_tracebacks", "stack_trace_on_crash",
                         "stack_trace_on_error"):  # fmt: skip
                setattr(self, name, True)

    def _read_source_tracebacks(self) -> bool:
        return Graph.debug.source_tracebacks

    def _apply_source_tracebacks(self, value: bool) -> None:
        Graph.debug.source_tracebacks = value

    def _apply_stack_trace_on_crash(self, value: bool) -> None:
        if value and not faulthandler.is_enabled():
            faulthandler.enable()
            # only what was enabled here is disabled again
            self._enabled_faults = True
        elif not value and self._enabled_faults:
            faulthandler.disable()
            self._enabled_faults = False

    def _apply_stack_trace_on_error(self, value: bool) -> None:
        if value and self._full_tracebacks is None:
            self._full_tracebacks = flags.override(MAX_TRACEBACK="full")
            self._full_tracebacks.__enter__()
        elif not value and self._full_tracebacks is not None:
            self._full_tracebacks.__exit__(None, None, None)
            self._full_tracebacks = None


def _options() -> dict[str, _Option[Any]]:
    return {name: value for name, value in vars(DebugConfig).items() if isinstance(value, _Option)}


def _parse_value(option: _Option[Any], text: str | None) -> Any:
    """The value of an option of ``MODULAR_DEBUG``; None for a name alone."""
    if option.kind is bool:
        words = {
            None: True,
            "1": True,
            "true": True,
            "on": True,
            "0": False,
            "false": False,
            "off": False,
        }
        if text not in words:
            raise ValueError(f"{option.name} is {text!r}, expected true or false")
        return words[text]
    if text is None:
        raise ValueError(f"{option.name} needs a value")
    if option.kind is PrintStyle:
        names = {style.name.lower().replace("_", "-"): style for style in PrintStyle}
        if text.lower() not in names:
            raise ValueError(f"{option.name} is {text!r}, expected one of {', '.join(names)}")
        return names[text.lower()]
    return text


@functools.cache
def current() -> DebugConfig:
    """The options of the process; the first call reads ``MODULAR_DEBUG``.

    Raises:
        ValueError: ``MODULAR_DEBUG`` has a wrong value, or an option that cannot be obeyed.
    """
    config = DebugConfig()
    config.take(flags.MODULAR_DEBUG)
    return config
