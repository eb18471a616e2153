"""The binding of inputs without models: sizes, overlaps, devices and forms of arguments against plain Python."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from max._compiler.program.code import TensorInfo
from max._errors import ArgumentError, ForeignTypeError
from max.driver import CPU, Accelerator, Tensor
from max.dtype import DType
from max.engine.run.input_binding import MOST_PAIRS, InputBinder
from max.mlir import DimExpr
from tests.devices.fake import fake_devices

F32, I32 = DType.float32, DType.int32
HOST, GPU = ("cpu", 0), ("gpu", 0)
N, M = DimExpr.symbol("n"), DimExpr.symbol("m")


def info(*shape: Any, dtype: DType = F32, mutable: bool = False, on: Any = HOST) -> TensorInfo:
    return TensorInfo(dtype, shape, on, mutable)


def binder(*infos: TensorInfo, symbols: Sequence[str] = ()) -> InputBinder:
    return InputBinder("m", infos, [f"x{i}" for i in range(len(infos))], symbols)


# sizes -------------------------------------------------------------------------------------------

DIMS: list[tuple[Any, Callable[[int, int], int]]] = [
    (N, lambda n, m: n),
    (M, lambda n, m: m),
    (3, lambda n, m: 3),
    (N * 2, lambda n, m: 2 * n),
    (N + M, lambda n, m: n + m),
    (M * N - 1, lambda n, m: m * n - 1),
]


@pytest.mark.parametrize("seed", range(30))
def test_symbols_and_what_does_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    dims = [rng.sample(DIMS, rng.randint(0, 3)) for _ in range(rng.randint(1, 3))]
    dims[rng.randrange(len(dims))] += DIMS[:2]
    bound = binder(*(info(*(dim for dim, _ in each)) for each in dims), symbols=("m", "n"))
    for _ in range(20):
        n, m = rng.randint(1, 4), rng.randint(1, 4)
        shapes = [tuple(size(n, m) for _, size in each) for each in dims]
        assert bound._bind(shapes) == (m, n)
        index = rng.randrange(len(shapes))
        assert bound._bind(shapes[:index] + [(*shapes[index], 1)] + shapes[index + 1 :]) is None
        if not shapes[index]:
            continue
        assert bound._bind(shapes[:index] + [shapes[index][1:]] + shapes[index + 1 :]) is None
        axis = rng.randrange(len(shapes[index]))
        other = list(shapes[index])
        other[axis] += rng.choice([-1, 1])
        changed = shapes[:index] + [tuple(other)] + shapes[index + 1 :]
        # sizes of other symbols may fit as well
        fitting = [
            (q, p)
            for p, q in itertools.product(range(6), range(6))
            if changed == [tuple(size(p, q) for _, size in each) for each in dims]
        ]
        assert bound._bind(changed) == (fitting[0] if fitting else None)
        if not fitting:
            args = [np.zeros(shape, np.float32) for shape in changed]
            with pytest.raises(ValueError, match=r"input 'x\d' of m .*: got shape .*; axis \d is"):
                bound.bind(args)


def test_sizes_that_are_only_expressions_are_computed() -> None:
    bound = binder(info(N), info(N * 2), symbols=("n",))
    assert bound._bind([(3,), (6,)]) == (3,) and bound._bind([(3,), (5,)]) is None
    # where some of the checks need no symbol
    bound = binder(info(N, 5), info(N * 2, N), symbols=("n",))
    assert bound._bind([(3, 5), (6, 3)]) == (3,)
    for wrong in ([(3, 4), (6, 3)], [(3, 5), (7, 3)], [(3, 5), (6, 2)]):
        assert bound._bind(wrong) is None
    with pytest.raises(
        ValueError,
        match=r"'x1' of m .*got shape \[7, 3\]; axis 0 is 7, expected n \* 2 = 6 \(n is 3 by axis 0 of input 'x0'\)",
    ):
        bound._wrong_shape([(3, 5), (7, 3)])


def test_no_symbols_and_symbols_of_nothing() -> None:
    assert binder()._bind([]) == ()
    assert binder(info(2), info())._bind([(2,), ()]) == ()
    with pytest.raises(ValueError, match="m: the sizes of k, n do not follow from the inputs"):
        binder(info(N + 1, M), symbols=("k", "m", "n"))


# overlaps ----------------------------------------------------------------------------------------


def place(ptr: int, *shape: int, dtype: DType = F32) -> Any:
    """A tensor as far as the checks look: numbers in place of memory."""
    copy = SimpleNamespace(_ptr=10**9, _shape=shape, _dtype=dtype)
    return SimpleNamespace(_ptr=ptr, _shape=shape, _dtype=dtype, copy=lambda: copy)


def bytes_of(tensor: Any) -> set[int]:
    size = math.prod(tensor._shape) * tensor._dtype.size_in_bytes
    return set(range(tensor._ptr, tensor._ptr + size))


@pytest.mark.parametrize("seed", range(40))
def test_overlaps_are_exact(seed: int) -> None:
    """Both checks, by sets of addresses, with memories of two devices whose addresses are the same numbers."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    memories: list[Any] = [object(), object()]
    dtypes = [rng.choice([DType.uint8, I32]) for _ in range(count)]
    sizes = [rng.randint(1, 6) for _ in range(count)]
    dims = [rng.choice([size, DimExpr.symbol(f"n{i}")]) for i, size in enumerate(sizes)]
    written = [rng.random() < 0.5 for _ in range(count)]
    bound = binder(
        *(info(d, 1, dtype=t, mutable=w) for d, t, w in zip(dims, dtypes, written, strict=True)),
        symbols=[str(dim) for dim in dims if not isinstance(dim, int)],
    )
    bound.memories = owners = [rng.choice(memories) for _ in range(count)]
    overlap = bound._make_overlap()
    for _ in range(60):
        tensors = [
            place(rng.randint(1, 60), size, 1, dtype=dtype)
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]
        pairs = [
            (i, j)
            for i, j in itertools.combinations(range(count), 2)
            if owners[i] is owners[j] and bytes_of(tensors[i]) & bytes_of(tensors[j])
        ]
        expected = any(written[i] or written[j] for i, j in pairs)
        assert bool(overlap(tensors)) is bool(bound._overlap_of_many(tensors)) is expected
        if any(written[i] and written[j] for i, j in pairs):
            with pytest.raises(ValueError, match="share memory, and the model writes to both"):
                bound._separate(tensors, True)
            continue
        if expected:
            with pytest.raises(ValueError, match="share memory: repeated executions"):
                bound._separate(list(tensors), False)
        copied = {j if written[i] else i for i, j in pairs if written[i] != written[j]}
        separated = list(tensors)
        bound._separate(separated, True)
        assert {i for i in range(count) if separated[i]._ptr == 10**9} == copied


def test_empty_tensors_overlap_nothing() -> None:
    bound = binder(info(N, mutable=True), info(M), symbols=("n", "m"))
    for first, second in ((place(8, 4), place(12, 0)), (place(12, 0), place(8, 4))):
        tensors = [first, second]
        bound._separate(tensors, False)
        assert tensors == [first, second]


@pytest.mark.parametrize("more", [0, 1])
def test_many_pairs_are_not_compared_by_generated_code(more: int) -> None:
    bound = binder(info(1, mutable=True), *(info(1) for _ in range(MOST_PAIRS + more)))
    overlap = bound._overlap
    assert overlap is not None
    assert (overlap.__name__ == "overlap") == (not more) and MOST_PAIRS == 64
    apart = [place(8 * number, 1) for number in range(MOST_PAIRS + more + 1)]
    assert not overlap(apart)
    assert overlap([*apart[:-1], apart[0]])


# forms of arguments ------------------------------------------------------------------------------


def test_tensors_that_fit_are_passed_as_they_are() -> None:
    bound = binder(info(N, mutable=True), info(N), symbols=("n",))
    first, second = (Tensor.from_numpy(np.zeros(3, np.float32)) for _ in range(2))
    tensors, values = bound.bind([first, second])
    assert tensors[0] is first and tensors[1] is second and values == (3,)
    # others become what fits
    wide = Tensor.from_numpy(np.arange(6, dtype=np.float32))
    tensors, _ = bound.bind([first, wide[::2]])
    assert tensors[1].is_contiguous and tensors[1].to_numpy().tolist() == [0, 2, 4]
    with pytest.raises(ArgumentError, match=r"'x1' of m .*got dtype int32 \(shape \[3\]\)$"):
        bound.bind([first, Tensor.from_numpy(np.zeros(3, np.int32))])
    with pytest.raises(ValueError, match="'x0' of m .*not contiguous"):
        bound.bind([wide[::2], second])


def test_a_hint_says_how_an_array_gets_the_dtype() -> None:
    def said(dtype: DType, value: object) -> str:
        with pytest.raises(ArgumentError) as caught:
            binder(info(1, dtype=dtype)).bind([value])
        return str(caught.value)

    array = np.zeros(1, np.float64)
    assert said(F32, array).endswith("got dtype float64 (shape [1]); array.astype('float32') fits")
    # NumPy alone has no such dtype; and no such method, torch
    assert said(DType.bfloat16, array).endswith("(shape [1])")
    assert said(F32, torch.zeros(1, dtype=torch.float64)).endswith("(shape [1])")


def test_arrays_of_other_libraries() -> None:
    negative = torch.ones(2, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    with pytest.raises(ArgumentError, match=r"'x0' of m .*resolve_neg"):
        binder(info(2, mutable=True)).bind([negative])
    (tensor,), _ = binder(info(2)).bind([negative])
    assert tensor.to_numpy().tolist() == [-0.0, -0.0]
    with pytest.raises(ForeignTypeError, match="'x0' of m "):
        binder(info(1)).bind([np.array(["a"])])
    with pytest.raises(ArgumentError, match="'x0' of m .*got str; a Tensor"):
        binder(info(1)).bind(["a"])
    with pytest.raises(ArgumentError, match="'x0' of m .*got NoneType; a Tensor"):
        binder(info(1)).bind([None])


NUMBERS: list[Any] = [True, 2, 1.5, np.True_, np.int16(3), np.float32(0.5), np.uint8(7)]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("dtype", [DType.bool, I32, DType.uint8, F32, DType.bfloat16], ids=str)
def test_numbers_fit_where_their_kind_does(number: Any, dtype: DType) -> None:
    """Bools everywhere, integers in all numbers, floats in floats."""
    kinds = {"b": 0, "i": 1, "u": 1, "f": 2}
    kind = kinds[np.asarray(number).dtype.kind]
    allowed = 0 if dtype is DType.bool else 2 if dtype.is_float() else 1
    bound = binder(info(dtype=dtype))
    if kind <= allowed:
        (tensor,), _ = bound.bind([number])
        assert tensor.dtype is dtype and tensor.shape == () and tensor.item() == number
    else:
        name = type(number).__name__
        with pytest.raises(ArgumentError, match=rf"'x0' of m .*: got .* \({name}\)$"):
            bound.bind([number])


def test_numbers_that_cannot_be_inputs() -> None:
    for number in (np.complex64(1), np.str_("a"), np.datetime64(1, "s")):
        with pytest.raises(ArgumentError, match="'x0' of m "):
            binder(info()).bind([number])
    with pytest.raises(ValueError, match="'x0' of m .*got the scalar 1, expected rank 2"):
        binder(info(1, 1)).bind([1])
    with pytest.raises(ValueError, match="'x0' of m .*int32"):
        binder(info(dtype=I32)).bind([1 << 31])
    with pytest.raises(ArgumentError, match="'x0' of m .*a buffer float32.*a float cannot change"):
        binder(info(mutable=True)).bind([1.0])


def test_wrong_counts() -> None:
    bound = binder(info(N, 2), info(dtype=I32), symbols=("n",))
    for args in ((), (1, 2, 3)):
        said = rf"^m takes 2 inputs \(x0: float32\[n, 2\], x1: int32\[\]\), got {len(args)}$"
        with pytest.raises(ArgumentError, match=said):
            bound.bind(args)
    for arg, said in (
        ([1, 2, 3], "one list of 3: give its items"),
        ((1, 2), "one tuple of 2"),
        ({"a": 1}, "a dictionary: give"),
        (3, "1$"),
    ):
        with pytest.raises(ArgumentError, match=f"got {said}"):
            bound.bind([arg])
    with pytest.raises(ArgumentError, match="got 3$"):
        bound.bind([[1], 2, 3])


# devices -----------------------------------------------------------------------------------------


def test_inputs_of_other_devices() -> None:
    with fake_devices(2):
        bound = binder(info(2, on=GPU), info(2, on=GPU, mutable=True), info(2))
        assert bound.devices == [Accelerator(0), Accelerator(0), CPU()]
        array = np.array([1, 2], np.float32)
        here = Tensor.from_numpy(array)
        there, other = here.to(Accelerator(0)), here.to(Accelerator(0))
        tensors, _ = bound.bind([there, other, here])
        assert [t is given for t, given in zip(tensors, [there, other, here], strict=True)] == [
            True, True, True,
        ]  # fmt: skip
        # arrays of the host are moved, tensors are not
        (moved, _, _), _ = bound.bind([array, other, here])
        assert moved.device is Accelerator(0)
        assert moved.to(CPU()).to_numpy().tolist() == [1, 2]
        for args, said in (
            ((here, other, here), r"'x0' of m \(a tensor float32\[2\] on gpu:0\): got a tensor on cpu:0"),
            ((there, here, here), r"'x1' of m \(a buffer float32\[2\] on gpu:0\): got a tensor on cpu:0"),
            ((there, other, there), r"'x2' of m \(a tensor float32\[2\]\): got a tensor on gpu:0"),
            ((here.to(Accelerator(1)), other, here), "got a tensor on gpu:1; move it"),
            ((there, array, here), "'x1' of m .*the model writes to it, and an array of the host is a copy"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=said):
                bound.bind(args)
        (number,), _ = binder(info(on=GPU)).bind([2.5])
        assert number.device is Accelerator(0) and number.to(CPU()).item() == 2.5
        # one tensor for both is copied on its device
        (copy, _, _), _ = bound.bind([other, other, here])
        assert copy is not other and copy.device is Accelerator(0)
        assert binder(info(2), info(2, on=GPU)).bind_arrays([array, array]) is None


# plain arrays ------------------------------------------------------------------------------------


def test_plain_arrays_are_bound_by_address() -> None:
    bound = binder(info(N), info(N, dtype=I32), symbols=("n",))
    x, y = np.zeros(3, np.float32), np.zeros(3, np.int32)
    assert bound.bind_arrays([x, y]) == ([x.ctypes.data, y.ctypes.data], (3,))
    locked = np.zeros(3, np.float32)
    locked.flags.writeable = False
    unaligned = np.zeros(13, np.uint8)[1:].view(np.float32)
    assert not unaligned.flags.aligned
    swapped = x.astype(x.dtype.newbyteorder())
    for other in (locked, unaligned, swapped, np.zeros(6, np.float32)[::2], x.view(np.recarray), y):
        assert bound.bind_arrays([other, y]) is None
    assert bound.bind_arrays([x]) is bound.bind_arrays([x, y, y]) is None
    assert bound.bind_arrays([x, y[:2]]) is None
    # rows of elements, not columns
    plane = np.zeros((2, 3), np.float32)
    assert binder(info(2, 3)).bind_arrays([plane]) == ([plane.ctypes.data], ())
    assert binder(info(2, 3)).bind_arrays([np.asfortranarray(plane)]) is None
    # arrays that are written and dtypes that NumPy itself lacks take the other way
    assert binder(info(3, mutable=True)).bind_arrays([x]) is None
    half = np.zeros(3, DType.bfloat16.to_numpy())
    assert binder(info(3, dtype=DType.bfloat16)).bind_arrays([half]) is None
