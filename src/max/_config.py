"""The registry of ``MAX_*`` environment variables: the one place that reads the environment.

Each flag is declared once on :class:`Flags`, with its type, default, help, and when it is read::

    from max._config import flags

    if flags.MAX_KERNEL_CHECK: ...
    with flags.override(MAX_NUM_THREADS=1): ...    # for tests

A flag follows the environment until it is overridden; its text is parsed when it changes.
``python -m max._config`` prints docs/environment.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from max._spelling import did_you_mean

if TYPE_CHECKING:
    from logging import Logger

T = TypeVar("T")

_ENVIRONMENT: Any = os.environ


class FlagError(ValueError):
    """A ``MAX_*`` variable has a value, or a name, that is not declared."""


class Flag(Generic[T]):
    """One declared variable; a descriptor of :class:`Flags`, which gives its parsed value.

    Args:
        parse: Turns the text into the value; raises ``ValueError`` with what would fit.
        default: The value when the variable is not set, or is empty.
        help: What it does, one or two sentences.
        read: When it is read, for the documentation.
        values: The accepted values, for the documentation.
    """

    def __init__(
        self, parse: Callable[[str], T], default: T, help: str, read: str, values: str
    ) -> None:
        self.parse, self.default = parse, default
        self.help, self.read, self.values = help, read, values
        self.name = ""
        self._key: Any = None
        self._parsed: tuple[Any, T] = (None, default)
        self._overrides: list[T] = []

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self._key = name, _ENVIRONMENT.encodekey(name)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Flag[T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Flag[T] | T:
        return self if instance is None else self.get()

    def __set__(self, instance: object, value: T) -> None:
        raise AttributeError(f"{self.name}: set the environment, or use flags.override(...)")

    def get(self) -> T:
        """The value in force: the innermost override, else the environment, else the default."""
        if self._overrides:
            return self._overrides[-1]
        # each eager op reads flags: the encoded text takes a tenth of the time of os.environ.get
        encoded = _ENVIRONMENT._data.get(self._key)
        parsed = self._parsed
        if encoded != parsed[0]:
            parsed = self._parsed = (encoded, self.convert(os.environ.get(self.name, "")))
        return parsed[1]

    def convert(self, value: object) -> T:
        """Parses a text as from the environment; checks a value given in Python the same way."""
        if isinstance(value, (frozenset, set, list, tuple)):
            value = ",".join(sorted(map(str, value)))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        text = "" if value is None else str(value).strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise FlagError(f"{self.name}={text}: {error}") from None


def _boolean(text: str) -> bool:
    word = text.lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 1 or 0 (or true, false, yes, no, on, off)")


def _bool_flag(help: str, read: str, default: bool = False) -> Flag[bool]:
    return Flag(_boolean, default, help, read, "`0`, `1`")


def _int_flag(default: int, low: int, high: int, help: str, read: str) -> Flag[int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return number

    return Flag(parse, default, help, read, f"`{low}` … `{high}`")


def _choice(text: str, choices: Iterable[str]) -> str:
    word = text.strip().lower()
    if word not in choices:
        expected = ", ".join(choices)
        raise ValueError(f"{word!r} is none of {expected}{did_you_mean(word, choices)}")
    return word


def _choice_flag(choices: tuple[str, ...], default: str, help: str, read: str) -> Flag[str]:
    values = ", ".join(f"`{c}`" for c in choices)
    return Flag(lambda text: _choice(text, choices), default, help, read, values)


def _set_flag(choices: tuple[str, ...], help: str, read: str) -> Flag[frozenset[str]]:
    def parse(text: str) -> frozenset[str]:
        return frozenset(_choice(word, choices) for word in text.split(",") if word.strip())

    values = "a comma list of " + ", ".join(f"`{c}`" for c in choices)
    return Flag(parse, frozenset(), help, read, values)


def _words(text: str) -> frozenset[str] | None:
    words = frozenset(word.strip().lower() for word in text.split(",") if word.strip())
    if any(word.startswith("+") or word == "-" or " " in word for word in words):
        raise ValueError(
            "expected a comma list of LLVM feature names, such as avx2,fma or -avx512f"
        )
    return words


class Flags:
    """All flags, as attributes. See the module's docstring."""

    MAX_CACHE_DIR: Flag[Path | None] = Flag(
        lambda text: Path(text).expanduser(),
        None,
        "Folder of the cache of compiled code. Not set: the user's cache folder of the platform.",
        "when a cache is opened",
        "a folder",
    )
    MAX_CACHE_SIZE = _int_flag(
        4096,
        1,
        1 << 24,
        "The largest size of the cache of compiled code in MiB; beyond it the least recently used entries are removed.",
        "when a cache is opened",
    )
    MAX_MODELS_DIR: Flag[Path | None] = Flag(
        lambda text: Path(text).expanduser(),
        None,
        "Folder of the models of `max pull`, `max ls` and `max serve` without a model. Not set: `~/.max/models`.",
        "when models are listed",
        "a folder",
    )
    MAX_WEIGHT_CACHE_SIZE = _int_flag(
        16384,
        0,
        1 << 24,
        "Size in MiB up to which packed weights are kept in the cache folder, where later starts map them (Linux). "
        "`0`: none; weights are packed at each start.",
        "when a model is loaded",
    )
    MAX_EAGER_PACKED_SIZE = _int_flag(
        2048,
        0,
        1 << 24,
        "Size in MiB up to which eager programs keep packed copies of weights that they have read unchanged in several "
        "runs. `0`: none.",
        "when weights were the same for a while",
    )
    MAX_CPU_FEATURES: Flag[frozenset[str] | None] = Flag(
        _words,
        None,
        "Restricts generated code to these CPU features, by their LLVM names; features that the "
        "machine lacks stay off. `-` before a name takes a feature, and all that build on it, away "
        "(`-amx-tile`), `native` stands for all that the machine has, `amx-emulated` makes kernels use "
        "the tiles of AMX on any machine, in memory and slowly: for tests. Not set: all that the machine has.",
        "when a target is made",
        "a comma list, such as `avx2,fma` or `-avx512f`",
    )
    MAX_NUM_THREADS = _int_flag(
        0,
        0,
        4096,
        "Number of workers of the pool. `0`: one a physical core that the process may use.",
        "when a session makes its pool",
    )
    MAX_PARKING = _choice_flag(
        ("auto", "futex", "portable"),
        "auto",
        "How idle workers sleep: `futex` (Linux), `portable` (a lock of the platform), or `auto`, "
        "the best that the platform has.",
        "when a session makes its pool",
    )
    MAX_DUMP = _set_flag(
        ("passes", "kernels", "llvm", "asm", "program"),
        "Shows what the compiler makes (on stderr where no logging is set up): the module after each pass, kernel IR, "
        "LLVM IR, assembly, the final program.",
        "at each compilation",
    )
    MAX_CHECK = _int_flag(
        1,
        0,
        3,
        "How much of the IR is verified: `1` at the borders between layers, `2` after "
        "each pass, `3` also that the printed form parses back to the same.",
        "at each compilation",
    )
    MAX_KERNEL_INTERPRET = _bool_flag(
        "Runs kernels in plain Python instead of compiling them.", "at each launch"
    )
    MAX_KERNEL_CHECK = _int_flag(
        0,
        0,
        2,
        "Compiles kernels with checks, which raise with the line: `1` compares indices with the sizes of views, `2` "
        "also every load and store with the memory of the tensor that it belongs to.",
        "at each compilation",
    )
    MAX_GUARD = _bool_flag(
        "For tests: each tensor that a model allocates (outputs, what lives during an execution, copies of weights and "
        "constants) ends at a page that nothing may touch, and begins as a pattern, at each execution.",
        "when a model is loaded",
    )
    MAX_DEBUG_NANS = _bool_flag(
        "Runs each op on eager tensors by itself, and raises FloatingPointError at the line of the first one whose "
        "result has a NaN that no operand has.",
        "at each op on eager tensors",
    )
    MAX_INTERPRET = _bool_flag(
        "Runs models on the NumPy interpreter instead of compiling them.", "at `load`"
    )
    MODULAR_DEBUG: Flag[str] = Flag(
        str,
        "",
        "Options of `InferenceSession.debug`: names with dashes, with values after `=`; `sensible` is a set of them.",
        "when the first session is made",
        "a comma list, such as `nan-check,op-log-level=info`",
    )
    MAX_PROFILE = _bool_flag(
        "Collects the time of each launch, and logs spans of `max.profiler`.",
        "when a model is loaded",
    )
    MAX_STEP_LOG: Flag[Path | None] = Flag(
        lambda text: Path(text).expanduser(),
        None,
        "A file to which engines append what each step was and how long it took, a line of JSON each: "
        "`max benchmark --simulate --costs FILE` learns the costs of steps from it.",
        "when an engine is made",
        "a file",
    )
    MAX_RUN_ALONE = _bool_flag(
        "Executions with too little work to share run on the calling thread and wake no other worker. `0`: all "
        "workers take part in each, for tests.",
        "when a model is loaded",
        default=True,
    )
    MAX_AUTOTUNE = _bool_flag(
        "Measures once, while the process is idle (or between executions if it never is), up to how many rows the path "
        "for few rows is faster in products; the disk cache keeps the result.",
        "when a model is loaded",
        default=True,
    )
    MAX_WINOGRAD = _bool_flag(
        "Computes convolutions of f32 images with 3 × 3 taps by Winograd's algorithm where that takes less time: the "
        "error is about twice as large, and an infinity or NaN reaches up to 3 more pixels along each axis.",
        "when a model is loaded",
        default=True,
    )
    MAX_TRACEBACK = _choice_flag(
        ("short", "full"),
        "short",
        "Whether tracebacks of errors that nobody caught leave out the frames of `max`, so that the last line shown is "
        "the user's.",
        "when a traceback is shown",
    )
    MAX_LOG_LEVEL = _choice_flag(
        ("debug", "info", "warning", "error", "critical"),
        "warning",
        "Level of the `max` logger.",
        "at the start of the command line",
    )

    def override(self, **values: object) -> Override:
        """Sets flags for the length of a ``with`` block, in all threads of the process.

        Args:
            values: Flag names with Python values or with texts as in the environment.

        Raises:
            FlagError: A name is not declared, or a value does not fit.
        """
        return Override(self, values)

    def export(self, name: str, value: object) -> None:
        """Sets a flag in the environment, for this process and those that it starts from now on.

        Args:
            name: The flag's name.
            value: A Python value, or a text as in the environment.

        Raises:
            FlagError: The name is not declared, or the value does not fit.
        """
        self.flag_of(name).convert(value)
        os.environ[name] = str(value)

    def declared_flags(self) -> dict[str, Flag[Any]]:
        """The declared flags by name, in the order of their declaration."""
        return {n: f for n, f in vars(type(self)).items() if isinstance(f, Flag)}

    def flag_of(self, name: str) -> Flag[Any]:
        """The flag of that name.

        Raises:
            FlagError: There is no such flag; the message has the nearest name.
        """
        flags_by_name = self.declared_flags()
        if name not in flags_by_name:
            raise FlagError(f"{name} is not a flag{did_you_mean(name, flags_by_name)}")
        return flags_by_name[name]

    def misspelt(self, environ: Mapping[str, str] | None = None) -> list[str]:
        """One line for each variable of the environment that looks like a misspelt flag."""
        flags_by_name, lines = self.declared_flags(), list[str]()
        for name in os.environ if environ is None else environ:
            if name.startswith("MAX_") and name not in flags_by_name:
                # other programs use MAX_… too: only near misses are reported
                if hint := did_you_mean(name, flags_by_name, cutoff=0.8):
                    lines.append(f"{name} is not a flag{hint}")
        return lines


class Override:
    """The context manager of :meth:`Flags.override`."""

    def __init__(self, owner: Flags, values: Mapping[str, object]) -> None:
        flagged = [(owner.flag_of(name), value) for name, value in values.items()]
        self._values = [(flag, flag.convert(value)) for flag, value in flagged]

    def __enter__(self) -> Override:
        for flag, value in self._values:
            flag._overrides.append(value)  # pyright: ignore[reportPrivateUsage]
        return self

    def __exit__(self, *exc: object) -> None:
        for flag, _ in self._values:
            flag._overrides.pop()  # pyright: ignore[reportPrivateUsage]


flags = Flags()


def terminal_kind() -> str:
    """The kind of terminal that the process runs in, such as ``dumb``; empty where none is named."""
    return os.environ.get("TERM", "")


def process_environment() -> dict[str, str]:
    """A copy of the environment, for processes that are started with more variables."""
    return dict(os.environ)


def set_missing_variables(variables: Mapping[str, str]) -> None:
    """Sets variables that the environment lacks, for this process and those that it starts from now on.

    Args:
        variables: The values by name.
    """
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def with_variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable that another package reads, for a `with` block.

    Args:
        name: The variable.
        value: Its value in the block.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def dump_log(kind: str) -> Logger | None:
    """The logger ``max.dump`` if ``MAX_DUMP`` names ``kind``, else None.

    It writes to stderr in a process that has not set up logging.
    """
    if kind not in flags.MAX_DUMP:
        return None
    import logging  # `max --help` does not load it

    log = logging.getLogger("max.dump")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    return log


def named_cache_dir() -> Path:
    """``MAX_CACHE_DIR``, else ``supremum`` in the user's cache folder, whoever may write to it."""
    if (folder := flags.MAX_CACHE_DIR) is not None:
        return folder
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "supremum" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "supremum"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "supremum"


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def documentation() -> str:
    """The text of docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "Made from `src/max/_config.py` by `python -m max._config`; do not edit.",
        "An unknown value is an error that names the nearest one. Empty means not set.",
        "",
        "| variable | values | default | read | what it does |",
        "|---|---|---|---|---|",
    ]
    for name, flag in flags.declared_flags().items():
        default = "not set" if flag.default in (None, frozenset()) else f"`{_text(flag.default)}`"
        lines.append(f"| `{name}` | {flag.values} | {default} | {flag.read} | {flag.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(documentation())
