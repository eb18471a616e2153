"""LLVM IR text to object code, for one machine.

Kernels come as LLVM IR with explicit vectors, so the pipeline is LLVM's function simplification at level 1, without the
vectorizer and the unroller. It has 12 passes over loops, whose time grows faster than the text. Long kernels, whose
tiles are unrolled already, take three passes without loops (docs/runtime.md has the measurements).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from max import kernel
from max._backends.cpu.runtime import platform
from max._config import dump_log
from max._host.process_caches import cached_results
from max._lazy import lazy_module
from max.kernel.targets.host import host_features

if TYPE_CHECKING:
    import llvmlite
    import llvmlite.binding as llvm
    from llvmlite.binding import ffi
else:
    # loads LLVM: not before the first kernel
    llvmlite = lazy_module("llvmlite")
    llvm = lazy_module("llvmlite.binding")
    ffi = lazy_module("llvmlite.binding.ffi")

PASSES = ("SROAPass", "SimplifyCFGPass", "InstCombinePass")
"""The passes of modules whose loops are not optimized; llvmlite's functions ``LLVMPY_module_Add…`` add them."""
PASS_MODE = "function-simplification-O1 " + " ".join(PASSES)
"""The names of the pipelines, as a part of the keys of object code."""
# releases in which the functions below share no state between contexts (checked in their source)
_LOCK_FREE_VERSIONS = {"0.50.0"}
_LOCK_FREE_FUNCTIONS = (
    "LLVMPY_ParseAssembly",
    "LLVMPY_RunNewModulePassManager",
    "LLVMPY_RunNewFunctionPassManager",
    "LLVMPY_TargetMachineEmitToMemory",
)


class Machine(NamedTuple):
    """Triple, CPU name and feature string, as LLVM takes them."""

    triple: str
    cpu: str
    feature_string: str

    @classmethod
    def of(cls, target: kernel.LLVMTarget) -> Machine:
        """The machine of a target."""
        return cls(target.triple, target.cpu, target.feature_string)

    @classmethod
    def host(cls) -> Machine:
        """This machine with all of its features."""
        return _host_machine()


@cached_results()
def _host_machine() -> Machine:
    triple, cpu = llvm.get_process_triple(), llvm.get_host_cpu_name()
    if platform.MACHINE == "aarch64":  # LLVM does not detect all features
        return Machine.of(kernel.CPUTarget(host_features(), triple, cpu))
    return Machine(triple, cpu, llvm.get_host_cpu_features().flatten())


class CompileError(RuntimeError):
    """LLVM rejects a module: an error of the code generator."""


@functools.cache
def _initialize_host() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@functools.cache
def _initialize_all() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@functools.cache
def lock_free() -> bool:
    """Removes llvmlite's global lock from the slow functions, in releases where that is safe.

    With a context per thread LLVM needs no lock; llvmlite takes one for callers that share contexts.
    """
    if llvmlite.__version__ not in _LOCK_FREE_VERSIONS:
        return False
    try:
        for name in _LOCK_FREE_FUNCTIONS:
            getattr(ffi.lib, name)._lock = contextlib.nullcontext()
    except AttributeError:
        return False
    return True


def create_target_machine(machine: Machine, level: int = 2) -> llvm.TargetMachine:
    """LLVM's code generator for a machine.

    Args:
        machine: The machine.
        level: The level of optimization of the code generator, 0 to 3.
    """
    if machine.triple == llvm.get_process_triple():
        _initialize_host()  # a millisecond less than all targets
    else:
        _initialize_all()
    code = platform.code_model(machine.triple)
    return llvm.Target.from_triple(machine.triple).create_target_machine(
        cpu=machine.cpu,
        features=machine.feature_string,
        opt=level,
        reloc=code.reloc,
        codemodel=code.model,
    )


SPEED_LEVEL = 1
"""The level of the pipeline that optimizes functions."""


def _address(reference: Any) -> int:
    """The address of an object of LLVM."""
    return ctypes.cast(reference._ptr, ctypes.c_void_p).value or 0


class Compiler:
    """Compiles LLVM IR text to object code for one machine; not thread-safe.

    Args:
        machine: The machine.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._target_machine = create_target_machine(machine)
        options = llvm.create_pipeline_tuning_options(speed_level=SPEED_LEVEL)
        options.loop_vectorization = options.slp_vectorization = False
        options.loop_unrolling = options.loop_interleaving = False
        self._builder = llvm.create_pass_builder(self._target_machine, options)
        self._layout = str(self._target_machine.target_data)
        self.native: Callable[[bytes, bytes, bytes, int, int, bool], bytes | None] | None = None
        """Compiles optimized modules in one call, if given: `native_compiler.NativeCompile`."""

    def compile(self, name: str, text: str, optimize: bool = True, loops: bool = True) -> bytes:
        """Verifies and optimizes a module, and emits its object code.

        Args:
            name: For errors and dumps.
            text: The module.
            optimize: Whether LLVM optimizes. IR that is already in its final form compiles five times as fast without.
            loops: Whether it optimizes loops as well, which takes most of the time of optimization.

        Raises:
            CompileError: The text does not parse or does not verify.
        """
        dumps = dump_log("llvm"), dump_log("asm")
        if self.native is not None and optimize and dumps == (None, None):
            data = self.native(
                text.encode(),
                self.machine.triple.encode(),
                self._layout.encode(),
                _address(self._target_machine),
                _address(self._builder),
                loops,
            )
            if data is not None:
                return data  # None: the calls below raise the error
        # a context of its own: contexts share no state between threads
        context = llvm.create_context()
        try:
            module = llvm.parse_assembly(text, context)
            module.verify()
        except RuntimeError as error:
            raise CompileError(f"LLVM refuses the module of {name}: {error}") from error
        module.triple = self.machine.triple
        module.data_layout = self._layout
        target_machine = (
            self._target_machine if optimize else create_target_machine(self.machine, 0)
        )
        if optimize:
            self._optimize(module, loops)
        if dump := dumps[0]:
            dump.info("LLVM IR of %s\n%s", name, module)
        if dump := dumps[1]:
            dump.info("assembly of %s\n%s", name, target_machine.emit_assembly(module))
        return target_machine.emit_object(module)

    def _optimize(self, module: llvm.ModuleRef, loops: bool) -> None:
        """Inlines functions that must be inlined, then simplifies each function, or runs `PASSES`."""
        passes = llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        for name in () if loops else PASSES:
            getattr(ffi.lib, f"LLVMPY_module_Add{name}")(passes)
        passes.run(module, self._builder)
        for function in module.functions if loops else ():
            if not function.is_declaration:
                # a new pass manager per function: one keeps analyzes of the function that it ran on
                self._builder.getFunctionPassManager().run(function, self._builder)

    def assembly(self, text: str) -> str:
        """The assembly of a module, for dumps and tests."""
        module = llvm.parse_assembly(text, llvm.create_context())
        self._optimize(module, True)
        return self._target_machine.emit_assembly(module)
