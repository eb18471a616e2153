"""Programs ready to be linked: compiled, or found on the disk, by their module or by a description of it.

A module's key is a hash of its text and of everything that determines its code. To write the text, the graph must be
staged, which loads xDSL and the graph layer. A caller that stages the same module at each start may describe it
instead, by the arguments of the function that stages it. The disk then holds a *recipe* under the description's key:
the key of the program, and what linking needs of the module (weights, constants, locations). A start that finds the
recipe stages nothing.

A description must cover everything that the staging function reads. The key adds the source files of the whole package,
the target, the flags and the versions of Python and NumPy, so the function itself must be one of `max`.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from max import mlir
from max._backends import Backends
from max._compiler.locations import SourceLocations
from max._compiler.program.code import Compiled
from max._compiler.record import is_recording
from max._compiler.stats import stats
from max._config import flags
from max._dataclass import dataclass
from max._host.claims import claim_entry
from max._host.disk_cache import content_key, default_cache, source_fingerprint
from max._host.garbage import rare_collections
from max._host.reentry import LockLevel, hold_lock, reentrant_lock
from max._lazy import lazy_module
from max._load_steps import STEPS
from max._version import __version__
from max.engine.load.weights import WeightInfo, declared_weights

if TYPE_CHECKING:
    from max._compiler import pipeline
else:
    # not needed where a program comes from the disk
    pipeline = lazy_module("max._compiler.pipeline")

__all__ = ["Loaded", "ProgramStore", "describe", "input_names"]

Array = np.ndarray[Any, np.dtype[Any]]

MOST_CONSTANTS = 128 << 20
"""The most bytes of constants in a recipe; a module with more has none, and each start stages it."""

WAITS = "waiting for another process, which compiles"
"""The load step that is shown while another process compiles the program."""

CACHE_FLAGS = frozenset({"MAX_CACHE_DIR", "MAX_CACHE_SIZE", "MAX_WEIGHT_CACHE_SIZE"})
"""Flags for the folders and sizes of caches, which do not affect code."""

CODE_PACKAGES = ("_compiler", "_backends", "kernel", "mlir", "dtype")
"""The packages whose source determines the code of a module."""


@dataclass(frozen=True)
class Loaded:
    """A program, its kernels in memory, and what linking needs of its module.

    Attributes:
        compiled: The program.
        kernels: For each device its loaded kernels by key, as launches name them.
        weights: The module's weights by name.
        constants: Its constants, by the number of their fixed buffer.
        locations: The locations of its ops.
        note: What the staging function returned beside the module.
        key: The program's key on the disk; None where it is not kept.
    """

    compiled: Compiled
    kernels: list[dict[str, int]]
    weights: dict[str, WeightInfo]
    constants: dict[int, Array]
    locations: SourceLocations
    note: Any = None
    key: str | None = None


@dataclass(frozen=True)
class _Recipe:
    """`Loaded` on the disk, without what the program's own entry holds."""

    program: str
    weights: dict[str, WeightInfo]
    constants: dict[int, Array]
    locations: list[str]
    note: Any


class ProgramStore:
    """The programs of a session.

    Args:
        backends: The devices of the session.
    """

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._lock = reentrant_lock(LockLevel.STORE)
        self.meanwhile: list[Callable[[], object]] = []
        """Functions that the next compilation calls once, while LLVM compiles its kernels."""

    def load(self, module: mlir.ModuleOp, note: object = None) -> Loaded:
        """The program of a module, from the disk if it is there.

        Args:
            module: The module.
            note: Becomes `Loaded.note`.

        Raises:
            ValueError: A weight has a symbolic dimension, or one name has two types.
            CompileError: The module cannot be compiled.
        """
        declared = declared_weights(module)
        names = input_names(module)
        key = self._key(module, names)
        program = None if key is None else self._from_disk(key)
        compiled, kernels = self._compile(module, names, key) if program is None else program
        constants = _constants(module, compiled)
        return Loaded(compiled, kernels, declared, constants, SourceLocations.of(module), note, key)

    def load_staged_graph(
        self, description: str | None, stage: Callable[[], tuple[mlir.ModuleOp, object]]
    ) -> Loaded:
        """The program of the module that a function stages; the function is not called if the disk has the recipe.

        Args:
            description: Covers everything that `stage` reads; see `describe`. None: there is no recipe.
            stage: Returns the module, and a note that can be pickled, or None: then no recipe is kept.

        Raises:
            ValueError: As :meth:`load`.
            CompileError: As :meth:`load`.
        """
        key = None if description is None else self._recipe_key(description)
        if key is None:
            return self.load(*stage())
        if (loaded := self._by_recipe(key)) is not None:
            return loaded
        cache = default_cache()
        is_made = cache.path("recipe", key).exists
        # replicas that start together need the same programs
        with claim_entry(cache.folder, key, is_made, lambda: STEPS.at(WAITS)) as claim:
            if claim.is_made and (loaded := self._by_recipe(key)) is not None:
                return loaded
            with STEPS.handed_to(claim.heartbeat):
                return self._make(key, stage)

    def _by_recipe(self, key: str) -> Loaded | None:
        """Loads the program of a recipe from the disk cache; None if an entry is missing."""
        if (blob := default_cache().get("recipe", key)) is None:
            return None
        # only this user writes to the folder of the cache
        recipe: _Recipe = pickle.loads(blob)
        if (program := self._from_disk(recipe.program)) is None:
            return None
        stats.recipes += 1
        return Loaded(
            *program, recipe.weights, recipe.constants, SourceLocations(recipe.locations), recipe.note,
            recipe.program,
        )  # fmt: skip

    def _make(self, key: str, stage: Callable[[], tuple[mlir.ModuleOp, object]]) -> Loaded:
        """Stages a module, loads its program, and writes the recipe."""
        loaded = self.load(*stage())
        # without a note the sources of the weights are unknown to a later start
        is_kept = loaded.key is not None and loaded.note is not None
        if is_kept and _bytes(loaded.constants) <= MOST_CONSTANTS:
            assert loaded.key is not None
            recipe = _Recipe(
                loaded.key, loaded.weights, loaded.constants, loaded.locations.texts(), loaded.note
            )
            blob = pickle.dumps(recipe, pickle.HIGHEST_PROTOCOL)
            default_cache().put("recipe", key, blob)
        return loaded

    def _from_disk(self, key: str) -> tuple[Compiled, list[dict[str, int]]] | None:
        """A program and its kernels; None if the disk lacks one of them."""
        if (blob := default_cache().get("program", key)) is None:
            return None
        start = time.perf_counter()
        compiled: Compiled = pickle.loads(blob)
        kernels = [
            backend.load_cached(list(kernels))
            for backend, kernels in zip(self._backends, compiled.kernels, strict=True)
        ]
        stats.add("from disk", start)
        loaded = [each for each in kernels if each is not None]
        if len(loaded) < len(kernels):
            return None
        stats.from_disk += 1
        return compiled, loaded

    @hold_lock("_lock")
    def _lower(self, module: mlir.ModuleOp, names: list[str]) -> tuple[Compiled, Any]:
        STEPS.at("compiling the graph")
        with rare_collections(keep=_first_compilation()):
            return pipeline.compile_module(module, names, self._backends, ahead=True)

    def _compile(
        self, module: mlir.ModuleOp, names: list[str], key: str | None
    ) -> tuple[Compiled, list[dict[str, int]]]:
        """Compiles a module and loads its kernels; stores the program under `key`, if there is one."""
        try:
            compiled, irs = self._lower(module, names)
            # LLVM is at work on the kernels that the lowering has started
            while self.meanwhile:
                self.meanwhile.pop()()
        except BaseException:
            for backend in self._backends:
                backend.cancel_started()
            raise
        start = time.perf_counter()
        kernels = [
            backend.load(kernels.values())
            for backend, kernels in zip(self._backends, irs, strict=True)
        ]
        stats.add("llvm", start)
        if key is not None:
            default_cache().put("program", key, pickle.dumps(compiled, pickle.HIGHEST_PROTOCOL))
        return compiled, kernels

    def _key(self, module: mlir.ModuleOp, names: Sequence[str]) -> str | None:
        """The key of a module: its ops without the contents of big constants, and everything that determines its code.

        None if an op runs a kernel of the user: `max.mlir.key_text` does not have its source.
        """
        devices = self._kept_devices()
        if devices is None or any(op.name == "mo.custom" for op in mlir.walk(module)):
            return None
        makers = [source_fingerprint(package) for package in CODE_PACKAGES]
        checked = f"{flags.MAX_KERNEL_CHECK}{flags.MAX_GUARD}{flags.MAX_WINOGRAD}"
        if flags.MAX_CHECK >= 2:
            # a program that was compiled at this level was verified at this level
            checked += f" verified {flags.MAX_CHECK}"
        return content_key(
            mlir.key_text(module), "\n".join(names), devices, checked, __version__, sys.version, np.__version__,
            *makers,
        )  # fmt: skip

    def _recipe_key(self, description: str) -> str | None:
        """The key of a description's recipe in the disk cache; None if programs are not kept."""
        devices = self._kept_devices()
        if devices is None or flags.MAX_INTERPRET:
            return None
        values = [
            # `repr` of a set has another order in each process
            f"{name}={describe(flag.get()) or repr(flag.get())}"
            for name, flag in flags.declared_flags().items()
            if name not in CACHE_FLAGS
        ]
        return content_key(
            description, devices, *values, __version__, sys.version, np.__version__, source_fingerprint(""),
        )  # fmt: skip

    def _kept_devices(self) -> str | None:
        """What the devices' code depends on; None where programs stay in this process."""
        # interpreted kernels belong to this process; a cached program is not recorded or dumped
        shown = flags.MAX_DUMP or is_recording()
        if flags.MAX_KERNEL_INTERPRET or shown:
            return None
        return self._backends.cache_key()


def _first_compilation() -> bool:
    """Whether the compiler is not imported yet: its modules live as long as the process."""
    return "max._compiler.lowering.graph_lowering" not in sys.modules


def describe(value: object) -> str | None:
    """A text that tells two values apart, for `ProgramStore.load_staged_graph`; None for a value of an unknown kind.

    Args:
        value: None, bools, numbers, strings, enums, classes and dataclasses of `max`, and lists, tuples, sets and
            mappings of them.
    """
    if isinstance(value, Enum):
        name = describe(type(value))
        return None if name is None else f"{name}.{value.name}"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if isinstance(value, type):
        # the sources of other classes are not part of the key
        is_ours = value.__module__.partition(".")[0] == "max"
        return f"{value.__module__}.{value.__qualname__}" if is_ours else None
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        pairs = _sequence_text([part for pair in items for part in pair])
        return None if pairs is None else f"map{pairs}"
    if isinstance(value, list | tuple):
        return _sequence_text(cast("Sequence[object]", value))
    if isinstance(value, frozenset | set):
        texts = _descriptions(cast("Collection[object]", value))
        return None if texts is None else f"{{{','.join(sorted(texts))}}}"
    if is_dataclass(value) and (name := describe(type(value))) is not None:
        inner = describe({field.name: getattr(value, field.name) for field in fields(value)})
        return None if inner is None else name + inner
    return None


def _descriptions(values: Collection[object]) -> list[str] | None:
    """The descriptions of several values; None if one has none."""
    descriptions = [describe(value) for value in values]
    texts = [text for text in descriptions if text is not None]
    return texts if len(texts) == len(descriptions) else None


def _sequence_text(values: Collection[object]) -> str | None:
    """The description of a sequence."""
    texts = _descriptions(values)
    return None if texts is None else f"({','.join(texts)})"


def _bytes(constants: Mapping[int, Array]) -> int:
    return sum(array.nbytes for array in constants.values())


def _constants(module: mlir.ModuleOp, compiled: Compiled) -> dict[int, Array]:
    """The constants of a module by their number among the program's fixed buffers."""
    named: dict[str, Array] | None = None
    constants: dict[int, Array] = {}
    for index, item in enumerate(compiled.fixed_buffers):
        if item.kind != "constant":
            continue
        array = item.array
        if array is None:
            named = mlir.resources(module) if named is None else named
            array = named[item.name]
        constants[index] = np.ascontiguousarray(array)
    return constants


def input_names(module: mlir.ModuleOp) -> list[str]:
    """The names of the inputs of a module's entry graph: those of its values, else ``input0``, ``input1``, …"""
    arguments = [a for a in mlir.entry(module).args if not isinstance(a.type, mlir.ChainType)]
    names = [argument.name_hint or f"input{index}" for index, argument in enumerate(arguments)]
    return (
        names if len(set(names)) == len(names) else [f"input{index}" for index in range(len(names))]
    )
