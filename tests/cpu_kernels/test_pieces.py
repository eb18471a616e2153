"""Inline functions that kernels share, in the interpreter, at bounds that whole kernels seldom reach."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.kernels.convolution.inputs import image_axes, inside, pad_input, padded_sizes
from max._backends.cpu.kernels.convolution.patches import (
    MAX_HEIGHT,
    Layout,
    Window,
    copy_patches,
    find_patches,
)
from max._backends.cpu.kernels.generation.candidates import MOST_KEPT
from max._backends.cpu.kernels.generation.logit_rows import (
    Distribution,
    find_tops,
    lowest_logit,
    row_in_blocks,
)
from max._backends.cpu.kernels.generation.row_cuts import count_cut, mass_row_cut, worker_memory
from max._backends.cpu.kernels.products.blocking import (
    BLOCK_PANELS,
    BLOCK_ROWS,
    BLOCK_SUMS,
    Blocking,
    plan,
    task_at,
    task_grid,
)
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import tiling
from max._backends.kernel_call import Operand, view
from max.dtype import DType
from tests.cpu_kernels.harness import interpreted, run, target
from tests.cpu_kernels.test_sampling import operands as sampling_operands


@k.kernel
def write_tasks(
    tasks: k.Output, sizes: k.Output, rows: k.i64, columns: k.i64, workers: k.i64, ctx: k.Context
) -> None:
    """Writes first row, rows, first strip and strips of each task of a product."""
    t = tiling(ctx.target, k.f32, k.f32)
    tiles, panels = plan(rows, columns, workers, t)
    b = Blocking(rows, k.ceildiv(columns, COLUMNS), t.height, tiles, panels)
    row_blocks, groups = task_grid(b)
    sizes[0] = tiles * t.height
    sizes[1] = panels
    sizes[2] = row_blocks * groups
    for row_block in range(row_blocks):
        for group in range(groups):
            task = task_at(b, row_block, group)
            for i in k.static_range(4):
                tasks[row_block * groups + group, i] = task[i]


def tasks_of(machine: str, rows: int, columns: int, workers: int) -> list[int]:
    """The maximum rows and panels of a task, and the number of tasks; checks that tasks cover each row of each strip
    once.
    """
    strips = -(-columns // COLUMNS)
    tasks, sizes = np.zeros((rows * strips, 4), np.int64), np.zeros(3, np.int64)
    k.interpret(write_tasks, [tasks, sizes, rows, columns, workers], target=target(machine))
    counts = np.zeros((rows, strips), np.int64)
    for row, row_count, strip, strip_count in tasks[: sizes[2]]:
        assert 0 < row_count <= rows - row and 0 < strip_count <= strips - strip
        counts[row : row + row_count, strip : strip + strip_count] += 1
    assert (counts == 1).all()
    return sizes.tolist()


@pytest.mark.parametrize("machine", ["avx2", "pairs"])
@given(rows=st.integers(1, 600), columns=st.integers(1, 1500), workers=st.sampled_from([1, 2, 16]))
def test_tasks_cover_each_product_once(machine: str, rows: int, columns: int, workers: int) -> None:
    task_rows, panels, tasks = tasks_of(machine, rows, columns, workers)
    height = tiling(target(machine), k.f32, k.f32).height
    # the capacity of a task's scratch memory
    assert 0 < task_rows <= BLOCK_ROWS and 0 < panels <= BLOCK_PANELS
    assert task_rows * panels * COLUMNS <= BLOCK_SUMS
    # enough tasks, or tasks of the least size
    assert tasks >= 8 * workers or (task_rows <= 4 * height and panels == 1)


@pytest.mark.parametrize(("rows", "columns"), [(252, 512), (252, 16384), (900, 4096), (12, 16384)])
def test_tasks_are_as_large_as_scratch_memory(rows: int, columns: int) -> None:
    task_rows, panels, _ = tasks_of("avx2", rows, columns, 0)
    assert task_rows * panels * COLUMNS <= BLOCK_SUMS and task_rows <= BLOCK_ROWS
    assert panels <= BLOCK_PANELS
    # one more panel does not fit
    assert task_rows * (panels + 1) * COLUMNS > BLOCK_SUMS or panels == BLOCK_PANELS


@k.kernel
def places(starts: k.Output, valid: k.Output, ctx: k.Context, *, first: int, count: int) -> None:
    """The positions of patches of a 3 × 3 window over an image of 6 × 5 pixels with a padding of 1."""
    layout = Layout(9, 1, 9, 3, 1, 5, 0, (1, 1, 6, 5), (0, 1, 1))
    window = Window((1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 0, 1, 1, 1, 1))
    find_patches(starts, valid, first, count, (1, 1, 6, 5), layout, window, 1)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 7), (17, 13)])
def test_places_after_the_last_equal_it(first: int, count: int) -> None:
    """Tiles of up to `MAX_HEIGHT` positions read them."""
    starts, valid = (np.full(count + MAX_HEIGHT, -(10**9), np.int64) for _ in range(2))
    k.interpret(places, [starts, valid], {"first": first, "count": count})
    h, w = np.divmod(np.arange(first, first + count), 5)
    np.testing.assert_array_equal(starts[:count], (h - 1) * 5 + w - 1)
    for i, (row, column) in enumerate(zip(h, w, strict=True)):
        taps = [(row + r - 1, column + s - 1) for r in range(3) for s in range(3)]
        bits = sum((0 <= y < 6 and 0 <= x < 5) << n for n, (y, x) in enumerate(taps))
        assert valid[i] == bits
    assert (starts[count:] == starts[count - 1]).all()
    assert (valid[count:] == valid[count - 1]).all()


@k.kernel
def copied(
    copy: k.InOut, x: k.Input, starts: k.Input, ctx: k.Context, *, begin: int, end: int, pair: int
) -> None:
    """Copies a part of patches of two lines of 5 elements with a stride of 8."""
    layout = Layout(10, 5, 2, 1, 0, 8, 0, None, None)
    window = Window((1, 2, 1), (1, 1, 1), (1, 1, 1), None)
    step = copy.shape[0] // starts.shape[0]
    count = starts.shape[0]
    copy_patches(copy, x, starts, count, begin, end, layout, window, step, pair)


@pytest.mark.parametrize(("begin", "end"), [(0, 10), (0, 5), (0, 9), (4, 10), (4, 7), (6, 7)])
@pytest.mark.parametrize("pair", [1, 2])
def test_copies_of_patches(begin: int, end: int, pair: int, rng: np.random.Generator) -> None:
    dtype: Any = ml_dtypes.bfloat16 if pair == 2 else np.float32
    x = rng.standard_normal(200).astype(dtype)
    starts = np.array([3, 0, 40, 11])
    copy = np.full((len(starts), 64 // pair), -1, np.int32)
    lanes = copy.reshape(-1) if pair == 2 else copy.reshape(-1).view(np.float32)
    params = {"begin": begin, "end": end, "pair": pair}
    k.interpret(copied, [lanes, x, starts], params, target=target("pairs"))
    got = copy.view(dtype)
    for start, row in zip(starts, got, strict=True):
        patch = np.concatenate([x[start : start + 5], x[start + 8 : start + 13]])[begin:end]
        if pair == 2 and len(patch) % 2:
            # the unused half of the last lane: NaN there times 0 would be NaN
            patch = np.append(patch, dtype(0))
        np.testing.assert_array_equal(row[: len(patch)], patch)


@k.kernel
def thresholds(
    out: k.Output, number: k.Output, row: k.Input, ctx: k.Context, *, count: int, share: float
) -> None:
    """The threshold of a row that keeps `count` tokens and `share` of their mass, and how many equal ones it keeps."""
    m = worker_memory(ctx)
    blocks = row_in_blocks(row, None, m.tops)
    d = Distribution(blocks, find_tops(blocks), k.f32(1), k.f32(np.log2(np.e)))
    threshold, ties = count_cut(d, k.i64(count), lowest_logit(d, k.f32(0)))
    out[0], number[0] = mass_row_cut(d, k.f32(share), threshold, ties, m)


@pytest.mark.parametrize("ties", [1, 3, 4, 5, 6])
def test_mass_that_is_rounded_up_keeps_no_more_equals_than_top_k(ties: int) -> None:
    """Beside 100 weights of 1 a weight of 1e-6 is a fraction of the last bit."""
    row = np.zeros(120, np.float32)
    row[100:] = np.log(1e-6)
    threshold, number = np.zeros(1, np.float32), np.zeros(1, np.int64)
    params = {"count": 100 + ties, "share": float(np.nextafter(np.float32(1), np.float32(0)))}
    k.interpret(thresholds, [threshold, number, row], params, target=target("avx2"))
    if threshold[0] == row[-1]:
        assert number[0] <= ties
    else:
        assert threshold[0] == 0 and number[0] == 100


@pytest.mark.parametrize("top_k", [MOST_KEPT - 1, MOST_KEPT, MOST_KEPT + 1])
def test_candidates_fit_into_their_memory(top_k: int, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((1, MOST_KEPT + 60)).astype(np.float32)
    given_ = sampling_operands(logits, top_k=top_k, seed=7)
    result = [(np.int64, (1,))]
    got = interpreted("mo.sample.token", given_, result)
    np.testing.assert_array_equal(got, run("mo.sample.token", given_, result))


@k.kernel
def write_taps(
    out: k.Output, first: k.i64, step: k.i64, taps: k.i64, size: k.i64, ctx: k.Context
) -> None:
    begin, end = inside(first, step, taps, size)
    out[0] = begin
    out[1] = end


def test_taps_inside_of_an_image() -> None:
    out = np.zeros(2, np.int64)
    for first, step, taps, size in itertools.product(range(-5, 6), (1, 2, 3), (1, 2, 3), (1, 3, 4)):
        k.interpret(write_taps, [out, first, step, taps, size])
        within = [tap for tap in range(taps) if 0 <= first + tap * step < size]
        assert list(range(*out)) == within


@k.kernel
def pad_image(
    out: k.Output, x: k.Input, ctx: k.Context, *, padding: tuple[int, ...], groups: int
) -> None:
    low = padding[0], padding[2], padding[4]
    pad_input(out, x, low, padded_sizes(x, padding), groups, ctx)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding", [(0,) * 6, (1, 0, 0, 2, 3, 1), (0, 1, 2, 0, 0, 3)], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 3, 2, 4), (1, 2, 2, 5, 6), (1, 1, 1, 1, 2)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_padded_images(
    dtype: Any, shape: tuple[int, ...], padding: tuple[int, ...], groups: int
) -> None:
    """Groups of channels one after the other, with zeros around each."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    around = [(0, 0), *zip(padding[::2], padding[1::2], strict=True), (0, 0)]
    padded = np.pad(x, around)
    grouped = padded.reshape(*padded.shape[:4], groups, -1)
    want = np.moveaxis(grouped, 4, 1).astype(dtype)
    for workers in (1, 2):
        out = np.full(want.size, 7, dtype)
        params = {"padding": padding, "groups": groups}
        k.interpret(pad_image, [out, x], params, workers, target("generic"))
        np.testing.assert_array_equal(out.reshape(want.shape), want)


def test_axes_of_images_and_volumes() -> None:
    operand = Operand(DType.float32, (2, 3, 5, 7))
    assert view("operand", 0, operand, image_axes(4)).shape == (2, 1, 3, 5, 7)
    operand = Operand(DType.float32, (2, 3, 5, 7, 11))
    assert view("operand", 0, operand, image_axes(5)).shape == (2, 3, 5, 7, 11)
