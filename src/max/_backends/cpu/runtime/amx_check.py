"""A test of AMX products: every worker of a small pool multiplies tiles as the library kernels do.

The results must equal those of the same kernel in plain Python.
"""

from __future__ import annotations

import numpy as np

from max import kernel as k
from max._backends.cpu.runtime import kernel_code
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool
from max._backends.program import Launch, Program

__all__ = ["check_products", "products_are_right"]

_WORKERS = 2


@k.kernel
def check_products(
    sums: k.Output[k.f32, 2],
    counts: k.Output[k.i32, 2],
    a: k.Input[k.bf16, 2],
    b: k.Input[k.bf16, 1],
    x: k.Input[k.i8, 1],
    w: k.Input[k.i8, 1],
    ctx: k.Context,
) -> None:
    """Each worker: 32 rows by 32 columns of bf16, added to the product itself; then 16 rows by 32 columns of bytes.

    What `sums` holds before does not count.

    `a` is `[32, 32]`, `b` `[16, 32, 2]`, `x` `[16, 32]` and `w` `[8, 32, 4]`; each worker has 32 rows of `sums` and 16
    of `counts`.
    """
    tiles = k.matrix_tiles(((16, 64),) * 8)
    tiles.configure()
    top = ctx.worker * 32
    # the second turn loads the sums of the first one, each to another tile than the one that still holds it
    for turn in k.static_range(2):
        for i in k.static_range(4):
            tiles.load((i + turn) % 4, sums, top + i // 2 * 16, i % 2 * 16)
            if turn == 0:
                tiles.zero(i)
        for half in k.static_range(2):
            tiles.load(4 + half, a, 16 * half, 0)
            tiles.load(6 + half, b, 32 * half, stride=64)
        for i in k.static_range(4):
            tiles.dot((i + turn) % 4, 4 + i // 2, 6 + i % 2, k.bf16)
        for i in k.static_range(4):
            tiles.store((i + turn) % 4, sums, top + i // 2 * 16, i % 2 * 16)
    small = k.matrix_tiles(((16, 64), (16, 32), (8, 64), (8, 64)))
    small.configure()
    small.load(1, x, 0, stride=32)
    for half in k.static_range(2):
        small.zero(0)  # the sums of the other half
        small.load(2 + half, w, 64 * half, stride=128)
        small.dot(0, 1, 2 + half, k.i8)
        small.store(0, counts, ctx.worker * 16, 16 * half)
    small.release()


def products_are_right(target: k.CPUTarget) -> bool:
    """Multiplies tiles in code for a target, in several threads; returns whether results equal plain Python's.

    Args:
        target: A target that this machine runs.
    """
    rng = np.random.default_rng(0)
    # small integers: every order of summation gives the same sums
    operands = [rng.integers(-8, 9, n).astype(k.bf16.numpy) for n in ((32, 32), 16 * 64)]
    operands += [rng.integers(-128, 128, n, np.int8) for n in (16 * 32, 8 * 128)]

    def results() -> list[np.ndarray]:
        shapes = ((np.float32, 32), (np.int32, 16))
        return [np.full((_WORKERS * rows, 32), 7, dtype) for dtype, rows in shapes]

    actual, expected = results(), results()
    k.interpret(check_products, [*expected, *operands], num_workers=_WORKERS, target=target)
    arrays = [*actual, *operands]
    specs = [k.TensorSpec(k.scalar_type(x.dtype), x.shape) for x in arrays]
    ir = k.specialize(check_products, specs, target=target)
    address = kernel_code.compile_kernels([ir], target)[ir.key]
    slots = [(0, word) for word in ir.words(arrays)]
    launch = Launch(address, slots, phases=ir.phases, name=ir.name, messages=ir.messages)
    pool = Pool(_WORKERS)
    try:
        Executor(pool, Program([launch], 1, ir.scratch_bytes)).run(np.zeros(1, np.int64))
    finally:
        pool.close()
    return all(np.array_equal(x, y) for x, y in zip(actual, expected, strict=True))
