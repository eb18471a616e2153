"""Host steps without programs: sizes of ranges and slices are those of NumPy and Python; jumps, copies and prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max._compiler.program.code import HostStepCode, SlotCode
from max.dtype import DType
from max.engine.run import host_steps
from max.engine.run.host_steps import (
    HostSteps,
    range_size,
    slice_sizes,
    slot_address,
)

pytestmark = pytest.mark.any_target

MOST_ELEMENTS = 1 << 47
"""Addresses have 47 bits."""
AT = 1000
"""The address of the bytes of a memory."""


class Memory:
    """The memory of a device."""

    def __init__(self, data: np.ndarray) -> None:
        self.bytes = data.reshape(-1).view(np.uint8).copy()
        self.reads: list[int] = []

    def read(self, address: int, num_bytes: int) -> np.ndarray:
        assert 0 <= address - AT and address - AT + num_bytes <= self.bytes.size
        self.reads.append(num_bytes)
        return self.bytes[address - AT :][:num_bytes]


def steps(
    codes: Sequence[HostStepCode], memories: Sequence[Memory], fixed: Sequence[int] = ()
) -> HostSteps:
    return HostSteps(codes, fixed, memories, "style")  # pyright: ignore[reportArgumentType]


def slots(count: int, item: int) -> tuple[SlotCode, ...]:
    """The addresses of bounds of equal size, one after the other; value 1 is the address of the memory."""
    return tuple(SlotCode(1, index * item) for index in range(count))


def code(rule: str, bounds: Sequence[SlotCode] = (), **options: Any) -> HostStepCode:
    fields: dict[str, Any] = {
        "symbols": (),
        "dtype": DType.int64,
        "shape": (),
        "devices": (0,) * len(bounds),
    }
    return HostStepCode(rule, bounds=tuple(bounds), **{**fields, **options})


VALUES = np.array([0, AT, 5, 7], np.int64)
INTEGERS = st.integers(-60, 60)


def test_a_slot_is_a_value_or_an_address() -> None:
    assert slot_address(SlotCode(3, 5), (100, 200)) == (3, 5)
    assert slot_address(SlotCode(3, 5, 0), (100, 200)) == (3, 105)
    assert slot_address(SlotCode(3, 5, 1), (100, 200)) == (3, 205)


@given(INTEGERS, INTEGERS, INTEGERS.filter(bool), st.sampled_from([np.int8, np.int32, np.int64]))
def test_ranges_of_integers_are_those_of_python(first: int, last: int, by: int, kind: type) -> None:
    bounds = [np.array([value], kind) for value in (first, last, by)]
    assert range_size(*bounds) == len(range(first, last, by))
    code_ = code(
        "range",
        slots(3, bounds[0].itemsize),
        symbols=("n",),
        dtype=DType.from_numpy(np.dtype(kind)),
    )
    found: dict[str, int] = {}
    memory = Memory(np.concatenate(bounds))
    assert steps([code_], [memory]).run(VALUES, found) == -1
    assert found == {"n": len(range(first, last, by))}


EIGHTHS = st.integers(-80, 80).map(lambda n: n / 8)


@given(
    EIGHTHS, EIGHTHS, EIGHTHS.filter(bool), st.sampled_from([np.float16, np.float32, np.float64])
)
def test_ranges_of_floats_are_those_of_numpy(
    first: float, last: float, by: float, kind: type
) -> None:
    # quotients of eighths are exact enough for NumPy and for the step to round alike
    size = range_size(*[np.array([value], kind) for value in (first, last, by)])
    assert size == np.arange(first, last, by).size


def test_ranges_without_a_size_are_errors() -> None:
    inf, nan = math.inf, math.nan
    bad = [(0, 4, 0), (0.0, 4.0, 0.0), (0.0, inf, 1.0), (0.0, -inf, -1.0), (nan, 1.0, 1.0), (0.0, nan, 1.0),
        (0.0, 1.0, nan), (inf, inf, 1.0), (0, MOST_ELEMENTS + 1, 1), (0.0, float(MOST_ELEMENTS + 1), 1.0)]  # fmt: skip
    for first, last, by in bad:
        with pytest.raises(ValueError, match="range"):
            range_size(*[np.array([value]) for value in (first, last, by)])
    for first, last, by, size in (
        (0, MOST_ELEMENTS, 1, MOST_ELEMENTS), (0.0, float(MOST_ELEMENTS), 1.0, MOST_ELEMENTS), (0.0, -inf, 1.0, 0),
        (inf, 0.0, 1.0, 0), (0.0, 5.0, inf, 0), (0.0, 0.0, 1.0, 0), (0.0, 1e-300, 1e-300, 1),
    ):  # fmt: skip
        assert range_size(*[np.array([value]) for value in (first, last, by)]) == size


@given(
    st.lists(
        st.tuples(st.integers(0, 9), INTEGERS, INTEGERS, INTEGERS.filter(bool)),
        min_size=1,
        max_size=4,
    )
)
def test_slices_are_those_of_numpy(axes: list[tuple[int, int, int, int]]) -> None:
    shape, *bounds = zip(*axes, strict=True)
    expected = np.empty(shape)[tuple(slice(*axis[1:]) for axis in axes)].shape
    assert tuple(slice_sizes(shape, *[np.array(each) for each in bounds])) == expected
    count = len(axes)
    # value 0 is 0: the sizes are addends
    sizes = tuple(SlotCode(0, size) for size in shape)
    symbols = tuple(f"s{axis}" if axis != 1 else "" for axis in range(count))
    read = code("slice", slots(3, 8 * count), symbols=symbols, shape=sizes)
    found = {"before": 1}
    assert steps([read], [Memory(np.array(bounds))]).run(VALUES, found) == -1
    # a size that has no symbol is known already
    assert found == {
        "before": 1,
        **{f"s{axis}": size for axis, size in enumerate(expected) if axis != 1},
    }


def test_a_slice_with_a_step_of_zero_is_an_error() -> None:
    zero = [np.array(each) for each in ((0, 0), (1, 1), (1, 0))]
    with pytest.raises(ValueError, match="slice: a step is 0"):
        slice_sizes((2, 2), *zero)


def test_sizes_are_read_from_the_device_and_the_slot_of_each_bound() -> None:
    first, second = (Memory(np.array(numbers, np.int32)) for numbers in ([1, 2, 3], [40, 50, 60]))
    bounds = (SlotCode(1, 4), SlotCode(2, 3 + 4, 1), SlotCode(1, 0))
    read = code("range", bounds, symbols=("n",), dtype=DType.int32, devices=(0, 1, 0))
    found: dict[str, int] = {}
    # the second bound is at 5 + 3 + 4 + 988: the start of the second memory
    assert steps([read], [first, second], (0, AT - 12)).run(VALUES, found) == -1
    assert found == {"n": len(range(2, 40, 1))}
    # a size as it is, for all of its symbols
    read = code("count", (SlotCode(1, 8),), symbols=("a", "", "b"), dtype=DType.int32, devices=(1,))
    assert steps([read], [first, second]).run(VALUES, found) == -1
    assert found == {"n": 38, "a": 60, "b": 60}


def test_branches_and_jumps_name_the_next_segment() -> None:
    memory = Memory(np.array([0, 1, 2, 0xFF], np.uint8))
    later = code("count", (SlotCode(1, 2),), symbols=("n",), dtype=DType.uint8)
    for offset, expected in ((0, 4), (1, -1), (2, -1), (3, -1)):
        found: dict[str, int] = {}
        # a predicate has one byte, whatever the dtype of the step
        branch = code("if_zero", (SlotCode(1, offset),), target=4, dtype=DType.bool)
        run = steps([code("cut"), branch, later], [memory]).run(VALUES, found)
        assert (run, found) == (expected, {} if expected == 4 else {"n": 2})
    found = {}
    jump = code("jump", target=0)
    assert steps([later, jump, code("jump", target=9)], [memory]).run(VALUES, found) == 0
    assert found == {"n": 2}


def test_copies_are_between_the_memories_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(host_steps, "copy_between", lambda *arguments: calls.append(arguments))
    source, target = Memory(np.zeros(4)), Memory(np.zeros(4))
    copy = code(
        "copy", (SlotCode(1, 3), SlotCode(2, 4, 1)), shape=(SlotCode(3, 10),), devices=(1, 0)
    )
    later = code("count", (SlotCode(1, 0),), symbols=("n",))
    found: dict[str, int] = {}
    assert steps([copy, later], [target, source], (0, 100)).run(VALUES, found) == -1
    assert calls == [(target, 5 + 4 + 100, source, AT + 3, 7 + 10)] and found == {"n": 0}


def test_prints_show_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    printing = SimpleNamespace(
        write=shown.append,
        show=lambda label, array, style: shown.append((label, array.tolist(), style)),
    )
    monkeypatch.setattr(host_steps, "printing", printing)
    memory = Memory(np.arange(12, dtype=np.float32))
    bound = (SlotCode(1, 8),)
    options: dict[str, Any] = {"dtype": DType.float32, "devices": (0,)}
    codes = [
        code("print", label="text"),
        code("print", bound, label="m", shape=(SlotCode(0, 2), SlotCode(2, 0)), **options),
        code("print", bound, label="scalar", **options),
        code("print", bound, label="empty", shape=(SlotCode(0, 0), SlotCode(0, 3)), **options),
    ]
    found: dict[str, int] = {}
    assert steps(codes, [memory]).run(VALUES, found) == -1 and not found
    rows = [[2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0]]
    assert shown == ["text", ("m", rows, "style"), ("scalar", 2.0, "style"), ("empty", [], "style")]
    # devices read at least an element
    assert memory.reads == [40, 4, 4]
