"""Runs kernels over NumPy arrays: compiled, through the worker pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from max import kernel as k
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.kernel_code import compile_kernels
from max._backends.cpu.runtime.pool import Pool
from max._backends.program import Launch, Program
from max.kernel.ir.spec import verify

_pools: dict[int, Pool] = {}


def pool(num_workers: int) -> Pool:
    """A pool that all tests share."""
    if num_workers not in _pools:
        _pools[num_workers] = Pool(num_workers)
    return _pools[num_workers]


def spec_of(arg: Any, static: bool = False) -> Any:
    """The specification of a kernel argument: run-time sizes unless ``static``."""
    if isinstance(arg, np.ndarray):
        shape = arg.shape if static else (None,) * arg.ndim
        strides = None
        if not arg.flags.c_contiguous:
            strides = tuple(s // arg.itemsize if static else None for s in arg.strides)
        return k.TensorSpec(k.scalar_type(arg.dtype), shape, strides)
    return k.scalar_type(arg.dtype)


def compiled(
    fn: k.Kernel,
    args: Sequence[Any],
    params: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    target: k.Target | None = None,
    static: bool = False,
    specs: Sequence[Any] | None = None,
) -> k.KernelIR:
    """Compiles a kernel for arrays (written in place) and NumPy scalars, and runs it once."""
    target = target or k.host_target()
    ir = k.specialize(fn, specs or [spec_of(a, static) for a in args], params, target)
    verify(ir)
    entry = compile_kernels([ir], target)[ir.key]
    slots = [(0, word) for word in ir.words(args)]
    launch = Launch(entry, slots, True, ir.phases, False, ir.name, ir.messages)
    Executor(pool(num_workers), Program([launch], 1, ir.scratch_bytes)).run(np.zeros(1, np.int64))
    return ir


def interpreted(
    fn: k.Kernel, args: Sequence[Any], params: Mapping[str, Any] | None = None, num_workers: int = 1
) -> None:
    """Runs a kernel in plain Python, in place."""
    k.interpret(fn, args, params, num_workers)


def both(
    fn: k.Kernel,
    args: Sequence[Any],
    params: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    rtol: float = 0.0,
    atol: float = 0.0,
    **options: Any,
) -> list[Any]:
    """Runs a kernel compiled and in plain Python, requires equal results, and gives the arrays."""
    copies = [a.copy(order="K") if isinstance(a, np.ndarray) else a for a in args]
    plain = [a.copy(order="K") if isinstance(a, np.ndarray) else a for a in args]
    compiled(fn, copies, params, num_workers, **options)
    interpreted(fn, plain, params, num_workers)
    for n, (a, b) in enumerate(zip(copies, plain, strict=True)):
        if isinstance(a, np.ndarray):
            wide = (np.float64 if x.dtype.kind not in "biu" else x.dtype for x in (a, b))
            x, y = (v.astype(t) for v, t in zip((a, b), wide, strict=True))
            np.testing.assert_allclose(
                x, y, rtol=rtol, atol=atol, err_msg=f"argument {n}: compiled and interpreted"
            )
    return copies
