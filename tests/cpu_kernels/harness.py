"""Runs a library kernel on NumPy arrays, as the compiler would launch it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from max import kernel as k
from max import mlir
from max._backends.cpu.kernels import library
from max._backends.cpu.runtime import kernel_code
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool
from max._backends.kernel_call import Arg, KernelCall, Limit, Operand, Scalar
from max._backends.program import Launch, Program
from max._compiler.lowering.specializations import Specializations
from max._host import host_memory
from max.dtype import DType
from max.graph import DeviceRef
from tests.guarded import PATTERN, Margins

AVX2 = frozenset({"avx2", "fma", "f16c", "bmi", "bmi2"})
SPECIALIZATIONS = Specializations(limit=16 << 20)
"""The kernel IR of this process's tests: examples that differ in run-time sizes or numbers have one kernel."""


@functools.cache
def pool(workers: int) -> Pool:
    """The pool of this many workers, shared by all tests."""
    return Pool(workers)


@functools.cache
def target(name: str) -> k.Target:
    """The target of a name.

    Args:
        name: ``"host"``, ``"avx2"``, ``"generic"`` (the baseline of the architecture), ``"pairs"`` (products of pairs
            of bf16) or ``"sapphirerapids"`` (the features of this machine, and the measured parameters of that one).
            The prefix ``"tiles "`` adds emulated AMX tiles, ``"invariant "`` makes results batch-invariant.
    """
    if name == "pairs":
        # for the interpreter: this machine may lack the instructions
        features = frozenset({"avx512bf16", "avx512vl"})
        return k.CPUTarget(features, "x86_64-unknown-linux-gnu", "x86-64")
    if name.startswith("invariant "):
        return target(name.removeprefix("invariant ")).batch_invariantly()
    if name.startswith("tiles "):
        plain = target(name.removeprefix("tiles "))
        return replace(plain, features=plain.features | {"amx-emulated"})
    host = k.host_target()
    if name == "host":
        return host
    if name == "sapphirerapids":
        return replace(host, cpu=name)
    generic = "x86-64" if host.is_x86 else "generic"
    features = AVX2 & host.features if name == "avx2" else frozenset[str]()
    return k.CPUTarget(features, host.triple, generic)


class Runner:
    """A kernel compiled for some operands, which can run repeatedly."""

    def __init__(
        self,
        name: str,
        operands: Sequence[np.ndarray],
        results: Sequence[tuple[Any, tuple[int, ...]]],
        attributes: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        machine: str = "host",
        params: Mapping[str, Any] | None = None,
        extra: Sequence[np.ndarray] = (),
        few: int | None = None,
    ) -> None:
        self.operands = [np.ascontiguousarray(x) if x.ndim else np.array(x) for x in operands]
        self.results = [_undefined(shape, dtype) for dtype, shape in results]
        self.call = call = lowered(name, self.operands, self.results, attributes, machine)
        self.workspaces = [_aligned(w.dtype.to_numpy(), w.shape) for w in call.workspaces]
        self.extra = extra
        self.limit = few
        self.machine = machine
        specs: list[k.TensorSpec | k.ScalarType] = [
            k.TensorSpec(arg.dtype, arg.spec_shape()) if isinstance(arg, Arg) else k.i64
            for arg in call.args
        ]
        specs += [k.TensorSpec(DType.from_numpy(x.dtype), (None,) * x.ndim) for x in extra]
        compiled_for = target(machine)
        all_params = {**call.params, **(params or {})}
        # the text of each value too: True is not 1
        named = tuple((key, value, repr(value)) for key, value in all_params.items())
        self.ir = SPECIALIZATIONS.get(
            (call.kernel, tuple(specs), named, compiled_for),
            lambda: k.specialize(call.kernel, specs, all_params, compiled_for),
        )
        self.values = np.array([0, *self.ir.words(self.arguments())], np.int64)
        entry = kernel_code.compile_kernels([self.ir], compiled_for)[self.ir.key]
        slots = [(i, 0) for i in range(1, len(self.values))]
        self.launch = Launch(
            entry,
            slots,
            phases=self.ir.phases,
            serial=call.serial,
            name=name,
            messages=self.ir.messages,
        )
        self.executor = Executor(
            pool(workers), Program([self.launch], len(self.values), self.ir.scratch_bytes)
        )

    def arguments(self) -> list[Any]:
        """The arguments of the call."""
        sources = {"operand": self.operands, "result": self.results, "workspace": self.workspaces}
        given: list[Any] = []
        for arg in self.call.args:
            if isinstance(arg, Limit):
                guess = _guess(arg, self.machine) if self.limit is None else self.limit
                given.append(np.int64(guess))
                continue
            if isinstance(arg, Scalar):
                given.append(np.int64(arg.value))
                continue
            array = sources[arg.source][arg.index]
            view = array.reshape([int(dim) for dim in arg.shape])
            assert view.ctypes.data == array.ctypes.data or not array.size
            given.append(view)
        return [*given, *self.extra]

    def place(self, margins: Margins, end: bool) -> None:
        """Moves operands, results and workspaces between guard pages, to the end or start of accessible memory."""
        self.operands = [margins.guard(x, end) for x in self.operands]
        self.results = [margins.guard(x, end) for x in self.results]
        self.workspaces = [margins.guard(x, end, host_memory.CACHE_LINE) for x in self.workspaces]
        self.values = np.array([0, *self.ir.words(self.arguments())], np.int64)

    def __call__(self) -> list[np.ndarray]:
        self.executor.run(self.values)
        return self.results


def together(runners: Sequence[Runner], workers: int = 2) -> Callable[[], None]:
    """One program with the launches of all runners, as in a model."""
    values = np.zeros(1, np.int64)
    launches: list[Launch] = []
    for runner in runners:
        first = len(values) - 1
        launches.append(
            replace(runner.launch, slots=[(first + i, 0) for i, _ in runner.launch.slots])
        )
        values = np.concatenate([values, runner.values[1:]])
    scratch = max(runner.ir.scratch_bytes for runner in runners)
    executor = Executor(pool(workers), Program(launches, len(values), scratch))
    return lambda: executor.run(values)


def run(
    name: str,
    operands: Sequence[np.ndarray],
    results: Sequence[tuple[Any, tuple[int, ...]]],
    attributes: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Compiles and runs a kernel once; operands that it changes are changed in place (they must be contiguous)."""
    return Runner(name, operands, results, attributes, **options)()


def _guess(limit: Limit, machine: str) -> int:
    # AMX tiles are tested with all numbers of rows
    return 0 if machine.startswith("tiles ") else limit.default


def _aligned(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = host_memory.allocate(max(size, 64))
    memory[:] = PATTERN
    return memory[:size].view(dtype).reshape(shape)


def _undefined(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(size, PATTERN, np.uint8).view(dtype).reshape(shape)


def check_declared(
    name: str,
    operands: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    attributes: Mapping[str, Any],
) -> None:
    """Checks operands against the signature of the op, as staging does."""
    spec = mlir.OPS[name].spec if name in mlir.OPS else None
    if spec is None or not spec.signature:
        return
    on = DeviceRef.CPU().to_mlir()
    types: list[Any] = [
        mlir.TensorType.get(DType.from_numpy(x.dtype), x.shape, on) for x in operands
    ]
    chain = [mlir.ChainType.get()] if spec.chained else []
    outputs = [mlir.TensorType.get(DType.from_numpy(x.dtype), x.shape, on) for x in results]
    present = [o for o in spec.signature if not o.present or o.present(attributes)]
    for index, (operand, type_) in enumerate(zip(present, types, strict=False)):
        types[index] = type_.as_buffer() if operand.is_buffer else type_
    try:
        if spec.infer is not None:
            spec.infer([*types, *chain], attributes)
        if spec.check is not None:
            spec.check([*types, *chain], [*outputs, *chain], attributes)
    except (ValueError, TypeError) as error:
        raise NotImplementedError(str(error)) from error


def lowered(
    name: str,
    operands: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    attributes: Mapping[str, Any] | None = None,
    machine: str = "host",
    checked: bool = True,
) -> KernelCall:
    """The launch of a kernel on operands and results.

    `checked` refuses what the specification of an op with declared operands refuses, as staging does.

    Raises:
        NotImplementedError: The specification of the op refuses them, or the kernel does.
    """
    if checked:
        check_declared(name, operands, results, attributes or {})
    described = [
        [Operand(DType.from_numpy(x.dtype), x.shape) for x in group]
        for group in (operands, results)
    ]
    return library.CPU_KERNELS.lower(
        name, described[0], described[1], attributes or {}, target(machine)
    )


def interpreted(
    name: str,
    operands: Sequence[np.ndarray],
    results: Sequence[tuple[Any, tuple[int, ...]]],
    attributes: Mapping[str, Any] | None = None,
    workers: int = 1,
    machine: str = "host",
    in_place: bool = False,
    checked: bool = True,
) -> list[np.ndarray]:
    """Runs a kernel in the interpreter, which checks every index; `checked` as for `lowered`.

    `in_place` gives results the memory of the operands that they may overwrite. Other results and workspaces begin with
    a pattern.
    """
    outputs = [_undefined(shape, dtype) for dtype, shape in results]
    call = lowered(name, operands, outputs, attributes, machine, checked)
    for result, operand in call.in_place if in_place else ():
        outputs[result] = operands[operand]
    workspaces = [_undefined(w.shape, w.dtype.to_numpy()) for w in call.workspaces]
    sources = {"operand": operands, "result": outputs, "workspace": workspaces}
    views = [
        _guess(arg, machine)
        if isinstance(arg, Limit)
        else arg.value
        if isinstance(arg, Scalar)
        else sources[arg.source][arg.index].reshape(arg.shape)
        for arg in call.args
    ]
    k.interpret(call.kernel, views, call.params, num_workers=workers, target=target(machine))
    return outputs
