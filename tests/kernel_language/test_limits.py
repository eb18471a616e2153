"""What a kernel fixes at compile time has stated bounds, with errors at its line, also in plain Python."""

from __future__ import annotations

import time

import numpy as np
import pytest

from max import kernel as k
from max.kernel.language.limits import MAX_TILE_BYTES, MAX_UNROLL, MAX_WIDTH
from tests.kernel_language.harness import compiled, interpreted

SECONDS = 20
"""Slack for a busy machine: without the bounds the kernels compile for minutes or for ever."""


@k.register("test_limits_tile")
def tile(y: k.Output[k.f32, 1], *, count: int):
    t = k.tile(k.f32, (count,), fill=0)
    y[0] = t[count - 1]


@k.register("test_limits_tiles")
def tiles(y: k.Output[k.f32, 1], *, count: int):
    for _ in k.static_range(count):
        t = k.tile(k.f32, (64, 4), width=16)
        t[0, 0] = k.splat(k.f32(1), 16)
        y[0] = t[0, 0][0]


@k.register("test_limits_width")
def width(y: k.Output[k.f32, 1], *, count: int):
    y[0] = k.splat(k.f32(1), count)[0]


@k.register("test_limits_iota")
def iota(y: k.Output[k.f32, 1], *, count: int):
    y[0] = k.iota(k.f32, count)[0]


@k.register("test_limits_vectors")
def tile_width(y: k.Output[k.f32, 1], *, count: int):
    t = k.tile(k.f32, (1,), width=count, fill=1)
    y[0] = t[0][0]


@k.register("test_limits_range")
def static_range(y: k.Output[k.f32, 1], *, count: int):
    for i in k.static_range(count):
        y[0] = i


@k.register("test_limits_unroll")
def unroll(y: k.Output[k.f32, 1], *, count: int):
    for i in k.unroll(range(count)):
        y[0] = i


@k.register("test_limits_nested")
def nested(y: k.Output[k.f32, 1], *, count: int):
    for _ in k.static_range(count):
        for _ in k.static_range(count):
            pass
    y[0] = 0


@k.register("test_limits_power")
def power(y: k.Output[k.f32, 1], *, count: int):
    y[0] = k.f32((3**count) % 7)


@k.register("test_limits_shift")
def shift(y: k.Output[k.f32, 1], *, count: int):
    y[0] = k.f32((1 << count) % 7)


@k.register("test_limits_repeat")
def repeat(y: k.Output[k.f32, 1], *, count: int):
    y[0] = k.f32(len([1, 2] * count))


def refuse(kernel, count, match):
    start = time.perf_counter()
    with pytest.raises(k.KernelError, match=match) as raised:
        compiled(kernel, [np.zeros(1, np.float32)], {"count": count})
    assert time.perf_counter() - start < SECONDS
    assert "test_limits.py" in str(raised.value)


BOTH = {
    "tile": (tile, MAX_TILE_BYTES // 4, "a tile of shape .* bytes, expected at most 65536"),
    "width": (width, MAX_WIDTH, "width is an integer in .1, 4096."),
    "iota": (iota, MAX_WIDTH, "width is an integer in .1, 4096."),
    "vectors": (tile_width, MAX_WIDTH, "width is an integer in .1, 4096."),
    "range": (static_range, MAX_UNROLL, "more than 65536 items to unroll"),
    "unroll": (unroll, MAX_UNROLL, "more than 65536 items to unroll"),
}
MORE = [1, 2**20, 2**40, 2**62, 2**64, 10**30]


@pytest.mark.parametrize("extra", MORE)
@pytest.mark.parametrize("name", BOTH)
def test_counts_beyond_the_bound_are_refused_by_compiler_and_interpreter(name, extra):
    kernel, most, match = BOTH[name]
    refuse(kernel, most + extra, match)
    with pytest.raises(ValueError, match=match):
        interpreted(kernel, [np.zeros(1, np.float32)], {"count": most + extra})


@pytest.mark.parametrize("name", ["tile", "width", "iota", "vectors"])
def test_the_bound_itself_compiles(name):
    kernel, most, _ = BOTH[name]
    if name == "tile":
        most //= 16  # the fill of the greatest tile takes seconds
    a, b = np.ones(1, np.float32), np.ones(1, np.float32)
    compiled(kernel, [a], {"count": most})
    interpreted(kernel, [b], {"count": most})
    assert a[0] == b[0]


@pytest.mark.parametrize("count", [10**9, 2**62, 10**30])
@pytest.mark.parametrize("kernel", [power, shift, repeat], ids=lambda kernel: kernel.name)
def test_integers_and_sequences_beyond_the_bound_are_refused(kernel, count):
    refuse(kernel, count, "more than 4096 bits|at most 65536 items")


@pytest.mark.parametrize("kernel", [power, shift, repeat], ids=lambda kernel: kernel.name)
def test_smaller_ones_are_computed(kernel):
    y = np.zeros(1, np.float32)
    compiled(kernel, [y], {"count": 100})
    assert y[0] == {power: 3**100 % 7, shift: 2**100 % 7, repeat: 200}[kernel]


def test_nested_loops_and_many_tiles_are_counted_together():
    refuse(nested, 60000, "more than 262144 unrolled iterations")
    refuse(tiles, 65, "the tiles of the kernel have more than 1048576 bytes")
    y = np.zeros(1, np.float32)
    compiled(tiles, [y], {"count": 64})
    assert y[0] == 1
