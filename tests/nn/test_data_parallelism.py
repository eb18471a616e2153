"""Batches that are split over devices, against slices of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType
from max.nn import split_batch, split_batch_replicated
from tests.nn.harness import BACKENDS, CPU_REF, Array, evaluate, normal

both = pytest.mark.parametrize("backend", BACKENDS)
NAMES = [["rows", 3], ["ends"], ["splits"]]


def parts_of(
    count: int, x: Array, offsets: Any, splits: Any, backend: str, group_size: int = 0
) -> list[Array]:
    """The rows of each device, then the offsets of each; with a group size those of `split_batch_replicated`."""
    devices = [CPU_REF] * count

    def forward(rows: Any, starts: Any, splits: Any) -> Any:
        if group_size:
            sides: list[Any] = [[value] * count for value in (rows, starts)]
            parts = split_batch_replicated(devices, *sides, starts, splits, "p", group_size)
        else:
            parts = split_batch(devices, rows, starts, splits)
        return [*parts[0], *parts[1]]

    arrays = [x, np.array(offsets, np.uint32), np.array(splits, np.int64)]
    return evaluate(forward, arrays, backend, dims=NAMES)


@both
@pytest.mark.parametrize("group_size", [0, 1, 2])
def test_drawn_batches(rng: np.random.Generator, backend: str, group_size: int) -> None:
    """Any number of sequences for each device, none and empty ones too."""
    for count in (1, 2, 4):
        if group_size == 2 and count == 1:
            continue
        groups = count // (group_size or 1)
        for _ in range(3):
            lengths = rng.integers(0, 4, rng.integers(0, 7))
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            inner = np.sort(rng.integers(0, len(lengths) + 1, groups - 1))
            splits = [0, *inner, len(lengths)]
            x = normal(rng, (int(offsets[-1]), 3))
            got = parts_of(count, x, offsets, splits, backend, group_size)
            for device in range(count):
                group = device // (group_size or 1)
                begin, end = splits[group], splits[group + 1]
                rows, starts = got[device], got[count + device]
                np.testing.assert_array_equal(rows, x[offsets[begin] : offsets[end]])
                np.testing.assert_array_equal(starts, offsets[begin : end + 1] - offsets[begin])
                assert starts.dtype == np.uint32


@both
@pytest.mark.parametrize(
    "splits",
    [[0, 1, 2], [1, 2, 3], [0, 2, 1], [0, 1, 4], [0, 4, 3], [-1, 1, 3], [0, 1], [0, 3, 4]],
    ids=str,
)
def test_splits_that_do_not_divide_the_batch(
    rng: np.random.Generator, backend: str, splits: list[int]
) -> None:
    """No sequence is left out or given twice, not even one without rows."""
    for offsets in ([0, 2, 3, 7], [0, 7, 7, 7], [0, 0, 0, 7]):
        with pytest.raises(Exception, match=r"slice|out of range|size"):
            parts_of(2, normal(rng, (7, 3)), offsets, splits, backend)


def test_types_and_arguments_that_do_not_fit() -> None:
    types = [
        TensorType(DType.float32, NAMES[0], CPU_REF),
        TensorType(DType.uint32, NAMES[1], CPU_REF),
    ]
    splits = TensorType(DType.int64, [3], CPU_REF)
    with Graph("split", input_types=[*types, splits]) as graph:
        rows, starts, at = (value.tensor for value in graph.inputs)
        parts = split_batch([CPU_REF, DeviceRef.CPU(1)], rows, starts, at)
        assert [list(part.shape) for part in parts[0]] == [
            [Dim("input_split_0"), 3], [Dim("input_split_1"), 3],
        ]  # fmt: skip
        assert [part.device for part in parts[1]] == [CPU_REF, DeviceRef.CPU(1)]
        one = split_batch([CPU_REF], rows, starts, at)
        assert one[0][0].shape == rows.shape and one[1][0].shape == starts.shape
        two = [CPU_REF] * 2
        for call, error, said in (
            (lambda: split_batch([], rows, starts, at), ValueError, "0 devices"),
            (
                lambda: split_batch([CPU_REF] * 3, rows, starts, at),
                ValueError,
                "3 elements, expected 4",
            ),
            (lambda: split_batch(two, rows, rows, at), TypeError, "expected integers"),
            (lambda: split_batch(two, rows, starts, rows), TypeError, "expected integers"),
            (lambda: split_batch(two, at[0], starts, at), ValueError, "expected rows"),
            (lambda: split_batch(two, rows, starts, at[0]), ValueError, "expected rank 1"),
            (
                lambda: split_batch_replicated(two, [rows], [starts], starts, at),
                ValueError,
                "1 inputs",
            ),
            (
                lambda: split_batch_replicated(two, [rows] * 2, [starts] * 2, starts, at, "", 3),
                ValueError,
                "2 devices in groups of 3",
            ),
        ):
            with pytest.raises(error, match=said):
                call()
        graph.output(parts[0][0])
