"""What the machine can do: the speed of reading from memory and of multiplying, with all workers, by two tiny kernels."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from max import kernel as k
from max._backends.cpu.runtime import amx, kernel_code
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool
from max._backends.program import Launch, Program

READ_BYTES = 256 << 20
STEPS = 400_000
CHUNK = 1 << 18


@k.kernel
def read(out: k.Output, x: k.Input, ctx: k.Context) -> None:
    """Sums an array, four vectors at a time."""
    width = ctx.target.width(k.f32)
    for chunk in ctx.parallel(x.shape[0] // CHUNK, grain=1):
        sums = k.tile(k.f32, (4,), width=width, fill=0)
        for i in range(0, CHUNK, 4 * width):
            for j in k.static_range(4):
                sums[j] = sums[j] + x.load(chunk * CHUNK + i + j * width, width=width)
        out[chunk] = k.reduce_add(sums[0] + sums[1] + sums[2] + sums[3])


@k.kernel
def multiply(out: k.Output, x: k.Input, ctx: k.Context, *, kind: str) -> None:
    """Multiplies and adds in 24 registers, or 12 where there are 16."""
    width = ctx.target.width(k.f32)
    registers = 24 if ctx.target.registers >= 32 else 12
    for worker in ctx.parallel(ctx.num_workers, grain=1):
        left = x.load(0, width=width)
        right = x.load(width, width=width)
        sums = k.tile(k.f32, (registers,), width=width, fill=0)
        for _ in range(STEPS):
            for j in k.static_range(registers):
                if kind == "bytes":
                    a, b = k.bitcast(left, k.u8), k.bitcast(right, k.i8)
                    bits = k.bitcast(sums[j], k.i32)
                    sums[j] = k.bitcast(k.dot_i8(bits, a, b, narrow=True), k.f32)
                elif kind == "bfloat16":
                    a, b = k.bitcast(left, k.bf16), k.bitcast(right, k.bf16)
                    sums[j] = k.dot_bf16(sums[j], a, b)
                else:
                    sums[j] = k.fma(left, right, sums[j])
        total = sums[0]
        for j in k.static_range(1, registers):
            total = total + sums[j]
        out[worker] = k.reduce_add(total)


@k.kernel
def multiply_tiles(out: k.Output, x: k.Input, ctx: k.Context, *, kind: str, steps: int) -> None:
    """Multiplies two matrix tiles by two, as products do."""
    tiles = k.matrix_tiles(((16, 64),) * 8)
    tiles.configure()
    for worker in ctx.parallel(ctx.num_workers, grain=1):
        for tile in k.static_range(4, 8):
            tiles.load(tile, x, 0, stride=16)
        for _ in range(steps):
            for i in k.static_range(4):
                tiles.dot(i, 4 + i // 2, 6 + i % 2, k.bf16 if kind == "bfloat16" else k.i8)
        tiles.store(0, out, worker * 256, stride=16)
    tiles.release()


def _best_seconds(pool: Pool, kernel: Any, arrays: Sequence[np.ndarray], **params: Any) -> float:
    target = amx.native_target()
    specs = [k.TensorSpec(x.dtype, x.shape) for x in arrays]
    ir = k.specialize(kernel, args=specs, params=params, target=target)
    entry = kernel_code.compile_kernels([ir], target)[ir.key]
    slots = [(i + 1, 0) for i in range(len(arrays))]
    program = Program([Launch(entry, slots, phases=ir.phases)], len(arrays) + 1, ir.scratch_bytes)
    executor = Executor(pool, program)
    values = np.array([0, *(x.ctypes.data for x in arrays)], np.int64)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        executor.run(values)
        best = min(best, time.perf_counter() - start)
    return best


def measure(pool: Pool) -> dict[str, float]:
    """Bytes a second read from memory, and operations a second on float32, on bfloat16 and on bytes, in the matrix tiles of AMX where they are used."""
    target = amx.native_target()
    big = _big()
    out = np.zeros(READ_BYTES // 4 // CHUNK, np.float32)
    small = np.zeros(64, np.float32)
    limits = {"read": READ_BYTES / _best_seconds(pool, read, [out, big])}
    registers = 24 if target.registers >= 32 else 12
    flops = 2 * registers * target.width(k.f32) * STEPS * pool.num_threads
    for kind, pack in (("float32", 1), ("bfloat16", 2), ("bytes", 4)):
        limits[kind] = pack * flops / _best_seconds(pool, multiply, [out, small], kind=kind)
    if not target.has("avx512bf16"):
        limits["bfloat16"] = limits["float32"]
    if target.tile_instructions:
        sums, tile = np.zeros(256 * pool.num_threads, np.float32), np.zeros(256, np.float32)
        flops = 4 * 2 * 16 * 16 * 32 * STEPS * pool.num_threads
        for kind, pack in (("bfloat16", 1), ("bytes", 2)):
            params = {"kind": kind, "steps": STEPS}
            seconds = _best_seconds(pool, multiply_tiles, [sums, tile], **params)
            limits[kind] = pack * flops / seconds
    return limits


@functools.cache
def _big() -> np.ndarray:
    return np.ones(READ_BYTES // 4, np.float32)
