"""What a kernel says of its launch: the memory of each view, what a result may overwrite, and what it refuses."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from max._backends.cpu.kernels import library
from max._backends.cpu.kernels.indexing import nonzero
from max._backends.kernel_call import Arg, KernelCall, Operand, around, operand_views, product, view
from max.dtype import DType
from tests.cpu_kernels.harness import interpreted, lowered, target
from tests.cpu_kernels.test_interpreted import CASES
from tests.tolerance import assert_close

F32, I64 = DType.float32, DType.int64


def calls() -> Iterator[tuple[str, KernelCall]]:
    """The launch of each case."""
    for name, (symbol, operands, results, attributes) in CASES.items():
        outputs = [np.empty(shape, dtype) for dtype, shape in results]
        yield name, lowered(symbol, operands, outputs, attributes)


def test_each_view_covers_the_memory_of_one_tensor() -> None:
    for name, call in calls():
        _, operands, results, _ = CASES[name]
        sizes = {
            "operand": [x.nbytes for x in operands],
            "result": [math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in results],
            "workspace": [math.prod(w.shape) * w.dtype.size_in_bytes for w in call.workspaces],
        }
        for arg in call.args:
            if isinstance(arg, Arg):
                assert 0 <= arg.index < len(sizes[arg.source]), (name, arg)
                size = math.prod(arg.shape) * arg.dtype.size_in_bytes
                assert size == sizes[arg.source][arg.index], (name, arg)


def test_a_result_may_overwrite_the_first_operand() -> None:
    seen = set[str]()
    for name, call in calls():
        symbol, operands, results, attributes = CASES[name]
        if not call.in_place:
            continue
        seen.add(symbol)
        assert call.in_place == ((0, 0),), name
        dtype, shape = results[0]
        assert (operands[0].dtype, operands[0].shape) == (np.dtype(dtype), shape), name
        expected = interpreted(symbol, copy.deepcopy(operands), results, attributes)
        got = interpreted(symbol, copy.deepcopy(operands), results, attributes, in_place=True)
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(ours, theirs)
    assert len(seen) == 9


Tensors = Sequence[tuple[DType, tuple[Any, ...]]]


REFUSALS: list[tuple[str, Tensors, Tensors, Mapping[str, Any], str]] = [
    ("gather_nd", [(F32, (3, 4)), (I64, (2, 2))], [(F32, (2,))], {"batch_dims": 1},
     "index vectors of 2 for rank 2 and batch_dims 1"),
    ("gather_nd", [(F32, (3, 4)), (I64, (2, "n"))], [(F32, (2,))], {"batch_dims": 0},
     "index vectors of n for rank 2 and batch_dims 0"),
    ("scatter_nd", [(F32, (3, 4)), (F32, (2,)), (I64, (2, 3))], [(F32, (3, 4))], {},
     "index vectors of 3 for rank 2"),
    ("scatter_nd", [(F32, (3, 4)), (F32, (2,)), (I64, (2, "n"))], [(F32, (3, 4))], {},
     "index vectors of n for rank 2"),
    ("pad", [(F32, (3,))], [(F32, (4,))], {"low": (0,), "mode": "reflect", "value": 0},
     "mode 'reflect' of a tensor of rank 1"),
    ("pad", [(F32, ())], [(F32, ())], {"low": (), "mode": "constant", "value": 0},
     "mode 'constant' of a tensor of rank 0"),
    ("slice_dynamic", [(F32, ()), *[(I64, (0,))] * 3], [(F32, ())], {}, "slice_dynamic of rank 0"),
    ("buffer_store_slice_dynamic", [(F32, ()), (F32, ()), *[(I64, (0,))] * 3], [], {},
     "store_slice_dynamic of rank 0"),
    ("argmax", [(F32, (3, 0))], [(I64, (3, 1))], {"axis": 1}, "argmax over an axis of size 0 (axis 1)"),
    ("argmin", [(F32, (0, 3))], [(I64, (1, 3))], {"axis": -2}, "argmin over an axis of size 0 (axis 0)"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "operands", "results", "attributes", "message"), REFUSALS)
def test_refused(
    op: str, operands: Tensors, results: Tensors, attributes: Mapping[str, Any], message: str
) -> None:
    described = [[Operand(*tensor) for tensor in group] for group in (operands, results)]
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        library.CPU_KERNELS.lower(
            f"mo.{op}", described[0], described[1], attributes, target("host")
        )


SERIAL = {
    "mo.check.counts", "mo.check.offsets", "mo.frequencies.update", "mo.moe.indices", "mo.latents.plan.ragged",
    "mo.lora.rows.ragged",
}  # fmt: skip


def test_kernels_without_parallel_loops_run_on_one_worker() -> None:
    serial = {CASES[name][0] for name, call in calls() if call.serial}
    assert serial == SERIAL


ALL = {
    "nonzero", "experts' order", "argsort", "checked counts", "checked offsets", "counts of tokens", "resize", "fold",
    "roi_align", "nms", "max_pool", "avg_pool",
}  # fmt: skip
"""Kernels without a constant size."""
SOME: dict[str, dict[int, tuple[int, ...]]] = {
    "cache load": {0: (0,), 1: (0, 2), 2: (0,), 3: (0, 1), -1: (0,)},
    "key store": {0: (0,), 1: (0,), 2: (0, 2), 3: (0,), 4: (0, 1)},
    "kv_store": {2: (0,), 3: (0, 2), 4: (0,), 5: (0, 1), 6: (0,)},
    "rope": {1: (0,), 2: (0,), 3: (0, 2), 4: (0,), 5: (0, 1), 6: (0,)},
    "penalties": dict.fromkeys(range(1, 7), (0,)),
    "causal convolution": {3: (0,), 4: (0,), 5: (0,), 6: (0,)},
}
"""The axes of operands, and of the result (-1), whose sizes are no constants: rows, sequences, pages, layers, slots."""


@pytest.mark.parametrize("name", [*sorted(ALL), *SOME])
def test_one_kernel_serves_all_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonzero, "CHUNK", 4)
    symbol, operands, results, attributes = CASES[name]

    def tensor(dtype: Any, shape: tuple[int, ...], at: int, more: int) -> Operand:
        grows = range(len(shape)) if name in ALL else SOME[name].get(at, ())
        sizes = tuple(size + more * (axis in grows) for axis, size in enumerate(shape))
        return Operand(DType.from_numpy(np.dtype(dtype)), sizes)

    specs: list[Any] = []
    for more in (0, 1):
        given = [tensor(x.dtype, x.shape, i, more) for i, x in enumerate(operands)]
        outputs = [tensor(dtype, shape, -1, more) for dtype, shape in results]
        call = library.CPU_KERNELS.lower(symbol, given, outputs, attributes, target("host"))
        shapes = [arg.spec_shape() for arg in call.args if isinstance(arg, Arg)]
        if name == "nonzero":
            # the second size of its result is a rank
            shapes[0] = shapes[0][:1]
        specs.append(shapes)
    assert specs[0] == specs[1]


def test_dims() -> None:
    """Sizes that a run knows, and sizes of 0, take a slot; any object that multiplies is a dim."""
    dims = (0, 3, "n", 5)
    arg = Arg("operand", 0, F32, dims, (True, True, True, False))
    assert arg.spec_shape() == (None, 3, None, None)
    assert [product(x) for x in ((), ("ab",), (1, "ab"), ("ab", 2), (2, 3))] == [1, "ab", "ab", "abab", 6]  # fmt: skip
    assert around(1, 4) == (range(1), (1,), range(2, 4))
    assert view("operand", 0, Operand(F32, dims)).static == (True,) * 4
    assert operand_views([Operand(F32, (2,))])[0].static == (True,)
    assert not KernelCall(None, ()).epilogue
