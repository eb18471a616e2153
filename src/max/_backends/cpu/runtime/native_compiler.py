"""Compiles a module with LLVM in one native call.

Through llvmlite a module takes 30 calls. After each, ctypes takes Python's lock again, and waits for it up to Python's
switch interval (5 ms) while the main thread specializes further kernels: a module that takes LLVM 20 ms took 50 to 350.
``max_compile(functions, job) -> i64`` calls the same functions of llvmlite's library in the same order without the
lock; the result is 1, or 0 if LLVM rejects the module.
"""

from __future__ import annotations

import ctypes
from typing import Any

from max._abi import CompileJob
from max._backends.cpu.runtime.llvm_compiler import PASSES, SPEED_LEVEL

__all__ = ["EXPORT", "FUNCTIONS", "TEXT", "NativeCompile", "function_table"]

EXPORT = "max_compile"

FUNCTIONS = (
    "ContextCreate",
    "ParseAssembly",
    "VerifyModule",
    "SetTarget",
    "SetDataLayout",
    "CreateNewModulePassManager",
    "module_AddAlwaysInlinerPass",
    *(f"module_Add{name}" for name in PASSES),
    "RunNewModulePassManager",
    "DisposeNewModulePassManger",
    "ModuleFunctionsIter",
    "FunctionsIterNext",
    "IsDeclaration",
    "buildFunctionSimplificationPipeline",
    "RunNewFunctionPassManager",
    "DisposeNewFunctionPassManger",
    "DisposeFunctionsIter",
    "TargetMachineEmitToMemory",
    "GetBufferStart",
    "GetBufferSize",
    "DisposeString",
    "DisposeModule",
    "ContextDispose",
)
"""The functions of llvmlite's library that the native code calls, without their prefix ``LLVMPY_``."""


def _loads() -> str:
    return "\n".join(
        f"  %p{i} = getelementptr ptr, ptr %functions, i64 {i}\n  %{name} = load ptr, ptr %p{i}"
        for i, name in enumerate(FUNCTIONS)
    )


def _added_passes() -> str:
    return "\n".join(f"  call void %module_Add{name}(ptr %passes)" for name in PASSES)


def _fields() -> str:
    """LLVM IR that loads the inputs of the `CompileJob` into names."""
    inputs = ("TEXT", "TRIPLE", "LAYOUT", "MACHINE", "BUILDER")
    return "\n".join(
        f"  %{n}.p = getelementptr i64, ptr %job, i64 {CompileJob[n].value}\n"
        f"  %{n} = load ptr, ptr %{n}.p"
        for n in inputs
    )


def _store(name: str, value: str, type: str) -> str:
    field = f"%{name}.p"
    return (
        f"  {field} = getelementptr i64, ptr %job, i64 {CompileJob[name].value}\n"
        f"  store {type} {value}, ptr {field}"
    )


TEXT = f"""
define i64 @{EXPORT}(ptr %functions, ptr %job) {{
entry:
{_loads()}
{_fields()}
  %message = alloca ptr
  store ptr null, ptr %message
  %context = call ptr %ContextCreate()
  %module = call ptr %ParseAssembly(ptr %context, ptr %TEXT, ptr %message)
  %unparsed = icmp eq ptr %module, null
  br i1 %unparsed, label %forget, label %verify

verify:
  %refused = call i8 %VerifyModule(ptr %module, ptr %message)
  %text = load ptr, ptr %message
  call void %DisposeString(ptr %text)
  store ptr null, ptr %message
  %invalid = icmp ne i8 %refused, 0
  br i1 %invalid, label %drop, label %inline

inline:
  call void %SetTarget(ptr %module, ptr %TRIPLE)
  call void %SetDataLayout(ptr %module, ptr %LAYOUT)
  %passes = call ptr %CreateNewModulePassManager()
  call void %module_AddAlwaysInlinerPass(ptr %passes)
  %LOOPS.p = getelementptr i64, ptr %job, i64 {CompileJob.LOOPS.value}
  %LOOPS = load i64, ptr %LOOPS.p
  %loops = icmp ne i64 %LOOPS, 0
  br i1 %loops, label %run, label %add
add:
{_added_passes()}
  br label %run
run:
  call void %RunNewModulePassManager(ptr %passes, ptr %module, ptr %BUILDER)
  call void %DisposeNewModulePassManger(ptr %passes)
  br i1 %loops, label %iterate, label %emit

iterate:
  %iterator = call ptr %ModuleFunctionsIter(ptr %module)
  br label %next

next:
  %function = call ptr %FunctionsIterNext(ptr %iterator)
  %last = icmp eq ptr %function, null
  br i1 %last, label %iterated, label %look

look:
  %declared = call i32 %IsDeclaration(ptr %function)
  %empty = icmp ne i32 %declared, 0
  br i1 %empty, label %next, label %optimize

; a new pass manager per function: one keeps analyzes of the function that it ran on
optimize:
  %simplify = call ptr %buildFunctionSimplificationPipeline(ptr %BUILDER, i32 {SPEED_LEVEL})
  call void %RunNewFunctionPassManager(ptr %simplify, ptr %function, ptr %BUILDER)
  call void %DisposeNewFunctionPassManger(ptr %simplify)
  br label %next

iterated:
  call void %DisposeFunctionsIter(ptr %iterator)
  br label %emit

emit:
  %buffer = call ptr %TargetMachineEmitToMemory(ptr %MACHINE, ptr %module, i32 1, ptr %message)
  %unmade = icmp eq ptr %buffer, null
  br i1 %unmade, label %drop, label %give

give:
  %start = call ptr %GetBufferStart(ptr %buffer)
  %size = call i64 %GetBufferSize(ptr %buffer)
{_store("BUFFER", "%buffer", "ptr")}
{_store("START", "%start", "ptr")}
{_store("SIZE", "%size", "i64")}
  br label %drop

drop:
  %done = phi i64 [ 0, %verify ], [ 0, %emit ], [ 1, %give ]
  call void %DisposeModule(ptr %module)
  br label %forget

forget:
  %result = phi i64 [ 0, %entry ], [ %done, %drop ]
  %left = load ptr, ptr %message
  %none = icmp eq ptr %left, null
  br i1 %none, label %leave, label %free
free:
  call void %DisposeString(ptr %left)
  br label %leave
leave:
  call void %ContextDispose(ptr %context)
  ret i64 %result
}}
"""


def function_table(library: Any) -> Any:
    """The addresses of `FUNCTIONS`, as an array.

    Args:
        library: llvmlite's library.

    Raises:
        AttributeError: It has no function of that name.
    """
    addresses = [_address(library, name) for name in FUNCTIONS]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _address(library: Any, name: str) -> int | None:
    return ctypes.cast(getattr(library._lib, f"LLVMPY_{name}"), ctypes.c_void_p).value


class NativeCompile:
    """``max_compile`` for Python.

    Args:
        address: Its address.
        library: llvmlite's library.
    """

    def __init__(self, address: int, library: Any) -> None:
        # CFUNCTYPE gives Python's lock away during the call, which takes milliseconds
        self._call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(address)
        self._functions = function_table(library)
        # PYFUNCTYPE keeps Python's lock: to release and take it would last longer than the call
        free = _address(library, "DisposeMemoryBuffer")
        assert free is not None
        self._free = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(free)

    def __call__(
        self, text: bytes, triple: bytes, layout: bytes, machine: int, builder: int, loops: bool
    ) -> bytes | None:
        """The object code of a module, optimized; None if LLVM rejects it.

        Args:
            text: The module.
            triple: Its target triple.
            layout: Its data layout.
            machine: The address of the target machine.
            builder: The address of the pass builder.
            loops: Whether loops are optimized; see `Compiler.compile`.
        """
        job = (ctypes.c_int64 * len(CompileJob))()
        # kept alive here: the job holds addresses only
        texts = [ctypes.c_char_p(value) for value in (text, triple, layout)]
        for field, value in zip(
            (CompileJob.TEXT, CompileJob.TRIPLE, CompileJob.LAYOUT), texts, strict=True
        ):
            job[field] = ctypes.cast(value, ctypes.c_void_p).value or 0
        job[CompileJob.MACHINE], job[CompileJob.BUILDER] = machine, builder
        job[CompileJob.LOOPS] = loops
        if not self._call(self._functions, job):
            return None
        try:
            return ctypes.string_at(job[CompileJob.START], job[CompileJob.SIZE])
        finally:
            self._free(job[CompileJob.BUFFER])
