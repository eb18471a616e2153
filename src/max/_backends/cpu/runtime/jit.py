"""Compiles LLVM IR text to machine code in this process, through the disk cache.

`max._backends.cpu.runtime.llvm_compiler` makes object code, which `max._host.disk_cache` keeps by content. Linked code
stays for the life of the process, and equal kernels are linked once. Outlined functions (`kernel.outlined`) are
objects of their own, which all kernels share: the names in a kernel's object say which it calls.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from max import kernel
from max._abi import FUNCTION_DIGITS, FUNCTION_PREFIX
from max._backends.cpu.runtime import platform
from max._backends.cpu.runtime.compiler_forks import ForkGuard
from max._backends.cpu.runtime.llvm_compiler import (
    PASS_MODE,
    CompileError,
    Compiler,
    Machine,
    create_target_machine,
    lock_free,
)
from max._config import flags
from max._dataclass import dataclass
from max._host.disk_cache import Cache, content_key, default_cache
from max._host.machine import usable_cpus
from max._host.process_caches import cached_results
from max._host.reentry import LockLevel, hold_lock, reentrant_lock
from max._lazy import lazy_module
from max._load_steps import STEPS

if TYPE_CHECKING:
    import llvmlite
    import llvmlite.binding as llvm

    from max._backends.cpu.runtime import compile_threads, native_compiler
else:
    # loads LLVM: not before the first kernel
    llvmlite = lazy_module("llvmlite")
    llvm = lazy_module("llvmlite.binding")
    # a start from the disk cache compiles nothing
    compile_threads = lazy_module("max._backends.cpu.runtime.compile_threads")
    native_compiler = lazy_module("max._backends.cpu.runtime.native_compiler")

logger = logging.getLogger("max.runtime")

_OBJECT_KIND = "object"

LONG_TEXT = 60_000
"""The characters of a kernel's text from which on LLVM does not optimize its loops: about 1,300 lines."""


@dataclass
class JitStats:
    """Counts since the process started; tests gate on them.

    ``compiled`` counts kernels compiled by LLVM, ``cached`` those read from the disk, ``linked`` their
    sum, ``reused`` requests for kernels that the process had loaded already. ``functions`` counts outlined
    functions compiled by LLVM.
    """

    compiled: int = 0
    cached: int = 0
    linked: int = 0
    reused: int = 0
    functions: int = 0


_FUNCTION_NAMES = re.compile(f"{FUNCTION_PREFIX}[0-9a-f]{{{FUNCTION_DIGITS}}}".encode())


class Unit(NamedTuple):
    """A module to load.

    Args:
        key: Equal keys mean equal code.
        exports: The names of the functions to export.
        text: Makes the module's text, with the modules of the outlined functions that it calls. Called on a miss only.
        optimize: Whether LLVM optimizes it.
        outlined: Whether it is an outlined function.
    """

    key: str
    exports: tuple[str, ...]
    text: Callable[[], str | kernel.Modules]
    optimize: bool = True
    outlined: bool = False


class Jit:
    """The code for one machine in this process."""

    def __init__(self, machine: Machine) -> None:
        _forks.check()
        self.machine = machine
        self._code_model = platform.code_model(machine.triple)
        self._lljit = llvm.create_lljit_compiler(
            create_target_machine(machine), use_jit_link=self._code_model.jitlink
        )
        _immortal.append(self._lljit)
        self._loaded: dict[str, dict[str, int]] = {}
        self._started: dict[str, Future[bytes]] = {}
        self._functions: dict[str, Unit] = {}
        """The outlined functions that are not loaded and whose text this process made, by key."""
        self._lock = reentrant_lock(LockLevel.JIT)
        self._local = threading.local()
        self._numbers = itertools.count()
        self._native: native_compiler.NativeCompile | None = None
        """What the compiler threads call, once `_prepare_threads` has linked it."""
        self._prepared = False

    def _compiler(self) -> Compiler:
        """The compiler of this thread: compilers are not thread-safe."""
        if not hasattr(self._local, "compiler"):
            self._local.compiler = Compiler(self.machine)
        self._local.compiler.native = self._native
        return self._local.compiler

    @hold_lock("_lock")
    def _prepare_threads(self) -> None:
        """Links the function that compiles a module without Python's lock, once."""
        if self._prepared:
            return
        self._prepared = True
        name, text = native_compiler.EXPORT, native_compiler.TEXT
        key = self.object_key(f"{name}-{content_key(text)} False")
        cache = default_cache()
        data = cache.get(_OBJECT_KIND, key)
        if data is None:
            data = self._compiler().compile(name, text, optimize=False)
            cache.put(_OBJECT_KIND, key, data)
        builder = llvm.JITLibraryBuilder().add_object_img(data).export_symbol(name)
        tracker = builder.link(self._lljit, name)
        _immortal.append(tracker)
        # a release without one of llvmlite's functions compiles as before
        with contextlib.suppress(AttributeError):
            self._native = native_compiler.NativeCompile(tracker[name], llvm.ffi.lib)

    def object_key(self, key: str) -> str:
        """The key on disk: the hash of the unit's key and of everything that determines the object code."""
        llvm_version = ".".join(map(str, llvm.llvm_version_info))
        code = self._code_model
        return content_key(
            *(
                key,
                llvmlite.__version__,
                llvm_version,
                *self.machine,
                PASS_MODE,
                str(LONG_TEXT),
                code.model,
                code.reloc,
            )
        )

    def start(self, unit: Unit) -> None:
        """Starts to compile a unit on another thread ahead of `load`.

        Does nothing if the code is loaded, started or on the disk, if it is dumped, or if there is only one core.

        Args:
            unit: The unit, which a later `load` probably requests.
        """
        if unit.key in self._loaded or unit.key in self._started or not _compiles_ahead():
            return
        _forks.check()
        if default_cache().has(_OBJECT_KIND, self._object_key_of(unit)):
            return
        if self._started:  # a single module gains less than the function costs
            self._prepare_threads()
        self._start(unit, self._text(unit))

    @hold_lock("_lock")  # no compilation starts during a fork
    def _start(self, unit: Unit, text: str) -> None:
        self._started[unit.key] = self._submit(unit, text)

    @hold_lock("_lock")
    def cancel_started(self) -> None:
        """Cancels the compilations that no thread has begun, after an error."""
        for key, future in list(self._started.items()):
            if future.cancel():
                del self._started[key]

    def wait_for_started(self) -> None:
        """Waits for all compilations that `start` began."""
        wait(list(self._started.values()))

    @hold_lock("_lock")
    def load(
        self,
        units: Sequence[Unit],
        symbols: Mapping[str, int] | None = None,
        cache: Cache | None = None,
    ) -> dict[str, dict[str, int]]:
        """Addresses of the exports of each unit.

        Args:
            units: The units; equal keys mean equal code.
            symbols: Addresses of functions that the units call, besides those of the process.
            cache: The cache of object code; default: the user's.

        Raises:
            CompileError: LLVM rejects a unit, or a symbol is missing.
            RuntimeError: The process was forked while another thread used LLVM.
        """
        cache = default_cache() if cache is None else cache
        missing = {unit.key: unit for unit in units if unit.key not in self._loaded}
        stats.reused += len(units) - len(missing)
        if missing:
            self._load_missing(list(missing.values()), symbols or {}, cache)
        return {unit.key: self._loaded[unit.key] for unit in units}

    def addresses(self, units: Mapping[str, Unit]) -> dict[str, int]:
        """The address of the first export of each unit, by the key of the mapping; see `load`."""
        loaded = self.load(list(units.values()))
        return {key: loaded[unit.key][unit.exports[0]] for key, unit in units.items()}

    def _object_key_of(self, unit: Unit) -> str:
        return self.object_key(f"{unit.key} {unit.optimize}")

    def _text(self, unit: Unit) -> str:
        """The text of a unit; starts to compile the functions that it calls."""
        source = unit.text()
        if isinstance(source, str):
            return source
        for name, text in source.functions.items():
            function = _function(name, functools.partial(str, text), unit.optimize)
            if function.key not in self._functions and function.key not in self._loaded:
                self._functions[function.key] = function
                self.start(function)
        return source.text

    def _load_missing(
        self, units: Sequence[Unit], symbols: Mapping[str, int], cache: Cache
    ) -> None:
        """Loads units that are not loaded, from cached objects where all parts are on the disk."""
        _forks.check()
        # cached code skips the steps that a dump shows
        dumped = flags.MAX_DUMP & {"llvm", "asm"}
        cached_objects: dict[str, bytes | None] = {}

        def cached_object(unit: Unit) -> bytes | None:
            if unit.key not in cached_objects:
                key = self._object_key_of(unit)
                cached_objects[unit.key] = None if dumped else cache.get(_OBJECT_KIND, key)
            return cached_objects[unit.key]

        objects = [cached_object(unit) for unit in units]
        for i, unit in enumerate(units):
            called = self._not_loaded(_functions_called(unit, objects[i]))
            if any(cached_object(f) is None and f.key not in self._functions for f in called):
                objects[i] = None  # only the kernel's text has that of the function
        try:
            self._link(units, objects, cached_object, symbols, cache)
            stats.cached += sum(data is not None for data in objects)
        except CompileError:
            if not any(cached_objects.values()):
                raise
            # a valid entry, but not an object that links: compile all units
            logger.debug("cached objects do not link, compiling them")
            self._link(units, [None] * len(units), lambda _: None, symbols, cache)

    def _not_loaded(self, functions: Iterable[Unit]) -> list[Unit]:
        """Filters outlined functions: those that are not loaded, with their text where it is known."""
        return [self._functions.get(f.key, f) for f in functions if f.key not in self._loaded]

    def _complete(
        self,
        units: Sequence[Unit],
        objects: Sequence[bytes | None],
        cache: Cache,
    ) -> list[bytes]:
        """The objects; compiles those that are None, and writes them to the cache."""
        absent = [i for i, data in enumerate(objects) if data is None]
        compiled = dict(zip(absent, self._compile([units[i] for i in absent]), strict=True))
        for i, data in compiled.items():
            cache.put(_OBJECT_KIND, self._object_key_of(units[i]), data)
        return [compiled[i] if data is None else data for i, data in enumerate(objects)]

    def _compile(self, units: Sequence[Unit]) -> list[bytes]:
        """The objects of the units; makes the text of one unit while LLVM compiles earlier ones."""
        on_this_thread = len(units) <= 1 or not _compiles_ahead()
        if not on_this_thread:
            self._prepare_threads()
        pending: list[tuple[Unit, Future[bytes] | bytes]] = []
        for unit in units:
            # a unit that was started ahead is waited for, not compiled again
            started = self._started.pop(unit.key, None)
            if started is not None:
                pending.append((unit, started))
            elif on_this_thread:
                pending.append((unit, self._work(unit, self._text(unit))))
            else:
                pending.append((unit, self._submit(unit, self._text(unit))))
        objects: list[bytes] = []
        for unit, data in pending:
            STEPS.at("compiling kernels", len(objects), len(pending))
            objects.append(data if isinstance(data, bytes) else self._result(unit, data))
        return objects

    def _result(self, unit: Unit, future: Future[bytes]) -> bytes:
        """The object of a unit that a thread compiles; in a process that was forked meanwhile, this thread."""
        while True:
            try:
                # a timeout, as in a forked child nobody completes the future
                return future.result(1.0)
            except TimeoutError:
                _forks.check()
                if future not in _compile_threads.pending() and not future.done():
                    return self._work(unit, self._text(unit))

    def _submit(self, unit: Unit, text: str) -> Future[bytes]:
        """Compiles a unit on another thread; of those that wait, the one with the longest text first."""
        return _compile_threads.threads().submit(
            len(text), functools.partial(self._work, unit, text)
        )

    def _work(self, unit: Unit, text: str) -> bytes:
        # most of the time of a short kernel, or of an outlined function, is in its loops
        loops = unit.outlined or len(text) <= LONG_TEXT
        return self._compiler().compile(unit.key, text, unit.optimize, loops)

    def _link(
        self,
        units: Sequence[Unit],
        objects: Sequence[bytes | None],
        find_object: Callable[[Unit], bytes | None],
        symbols: Mapping[str, int],
        cache: Cache,
    ) -> None:
        """Links the units with the functions that they call; compiles objects that are None.

        Args:
            units: The units.
            objects: Their objects.
            find_object: Returns the object of a function from the disk, or None.
            symbols: Addresses of other functions that the units call.
            cache: Where new objects are written.
        """
        # first the kernels, whose objects say which functions they call
        complete = self._complete(units, objects, cache)
        called = {
            function.key: function
            for unit, data in zip(units, complete, strict=True)
            for function in _functions_called(unit, data)
        }
        functions = self._not_loaded(called.values())
        function_objects = [find_object(function) for function in functions]
        builder = llvm.JITLibraryBuilder()
        for data in (*complete, *self._complete(functions, function_objects, cache)):
            builder.add_object_img(data)
        builder.add_current_process()
        imported_symbols = dict(symbols)
        # functions of earlier links are addresses by now
        for key in called:
            imported_symbols |= self._loaded.get(key, {})
        for name, address in imported_symbols.items():
            builder.import_symbol(name, address)
        exporting_units = (*units, *functions)
        for unit in exporting_units:
            for name in unit.exports:
                builder.export_symbol(name)
        try:
            tracker = builder.link(self._lljit, f"max{next(self._numbers)}")
        except RuntimeError as error:
            names = ", ".join(unit.key for unit in units)
            raise CompileError(f"cannot link {names}: {error}") from error
        _immortal.append(tracker)
        for unit in exporting_units:
            # the text is not needed again
            self._functions.pop(unit.key, None)
            self._loaded[unit.key] = {name: tracker[name] for name in unit.exports}
        stats.linked += len(units)
        stats.compiled += objects.count(None)
        stats.functions += function_objects.count(None)


def _function(name: str, text: Callable[[], str], optimize: bool) -> Unit:
    return Unit(name if optimize else f"{name}.plain", (name,), text, optimize, True)


def _functions_called(unit: Unit, data: bytes | None) -> list[Unit]:
    """The outlined functions that the object of a unit calls, without their text."""
    names: set[bytes] = set(_FUNCTION_NAMES.findall(data or b""))
    return [_function(name.decode(), absent_text, unit.optimize) for name in sorted(names)]


stats = JitStats()


class _CompileThreads:
    """The compiler's threads of this process, one per core; they start with the first compilation."""

    def __init__(self) -> None:
        self._threads: compile_threads.LongestFirst[bytes] | None = None

    def threads(self) -> compile_threads.LongestFirst[bytes]:
        """The threads."""
        if self._threads is None:
            self._threads = compile_threads.LongestFirst(_cores())
        return self._threads

    def pending(self) -> set[Future[bytes]]:
        """The compilations that wait or run."""
        return set() if self._threads is None else self._threads.unfinished

    def forget(self) -> None:
        """Drops the threads, which a forked child does not have."""
        self._threads = None


_compile_threads = _CompileThreads()


@atexit.register
def _end_compilations() -> None:
    """Waits for the compilations that run: LLVM must not be in use when the process ends."""
    for future in list(_compile_threads.pending()):
        future.cancel()
    wait(list(_compile_threads.pending()))


@cached_results()
def _cores() -> int:
    """The usable cores. Counting them reads files of the system, for as long as LLVM takes for 20 lines."""
    return usable_cpus()


def _compiles_ahead() -> bool:
    """Whether several threads may compile at a time; not while steps are dumped in order."""
    return _cores() > 1 and lock_free() and not flags.MAX_DUMP & {"llvm", "asm"}


# never disposed: native memory holds addresses of their code
_immortal: list[Any] = []
_jits: dict[Machine, Jit] = {}
_jits_lock = reentrant_lock(LockLevel.JITS)


@hold_lock(_jits_lock)
def jit_for(machine: Machine) -> Jit:
    """The JIT of a machine, one per process."""
    if machine not in _jits:
        _jits[machine] = Jit(machine)
    return _jits[machine]


def compile_llvm(texts: Mapping[str, str], target: kernel.LLVMTarget) -> dict[str, int]:
    """Addresses of functions given as LLVM IR text.

    Args:
        texts: Modules by key; each defines the function ``"k_" + key``. Code is cached by key and text.
        target: The machine to compile for.

    Raises:
        CompileError: LLVM rejects a module.
    """
    units = {
        key: Unit(f"{key}.{content_key(text)}", (f"k_{key}",), functools.partial(str, text))
        for key, text in texts.items()
    }
    return jit_for(Machine.of(target)).addresses(units)


def absent_text() -> str:
    """The text of a unit of which only the key is known: raises `AbsentError`."""
    raise AbsentError


class AbsentError(Exception):
    """A kernel's text was needed where only its key is known."""


def _locks() -> list[Any]:
    return [_jits_lock, *[jit._lock for jit in list(_jits.values())]]  # pyright: ignore[reportPrivateUsage]


_forks = ForkGuard(_locks, _compile_threads.pending, _compile_threads.forget)
