"""Sizes, offsets, positions, pages and tokens that only a run knows: the last that fits has a result, the next is an
error that names it. The interpreter also refuses each access outside of a tensor.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max._backends.cpu.kernels.recurrence.slots import state_views
from max._backends.kernel_call import Arg, Operand
from max.dtype import DType
from tests.cpu_kernels.harness import interpreted, lowered
from tests.cpu_kernels.test_interpreted import CASES
from tests.cpu_kernels.test_violating import operand, result
from tests.tolerance import assert_close

Array = np.ndarray[Any, Any]
Change = Callable[[list[Array], list[Any]], None]
I32, U32 = np.int32, np.uint32
PLAIN = " without parameters"


def numbers(at: int, *values: Any) -> Change:
    """Other numbers in an operand of integers."""
    return operand(at, lambda x: np.array(values, x.dtype).reshape(-1 if x.ndim == 1 else x.shape))


def of_shape(at: int, *shape: int) -> Change:
    """An operand of another shape."""
    return operand(at, lambda x: np.resize(x, shape).astype(x.dtype))


def changed(
    name: str, change: Change, checked: bool = False, **attributes: Any
) -> tuple[list[Array], list[Array]]:
    """Runs a case after a change; returns its results, and its operands after the run.

    Only where `checked`, the op's specification looks at it first.
    """
    symbol, operands, results, usual = copy.deepcopy(CASES[name.removesuffix(PLAIN)])
    usual = {} if name.endswith(PLAIN) else usual
    change(operands, results)
    attributes = {**usual, **attributes}
    return interpreted(symbol, operands, results, attributes, checked=checked), operands


TABLE = (4, 5, 0, 0, 2, 6, 3)
"""The page table of both sequences but for the last page, that of the tokens 12 to 15 of the second one."""
REFUSED: list[tuple[str, Change, str]] = [
    ("kv_store", of_shape(0, 15, 31), "a key has size 31, expected 32"),
    ("kv_store", of_shape(1, 15, 33), "a value has size 33, expected 32"),
    ("kv_store", of_shape(1, 16, 32), "values has size 16, expected 15"),
    ("kv_store", operand(3, lambda x: x[:, :1]), "the cache has 1 kinds of pages of 4 tokens, expected 2"),
    ("kv_store", operand(3, lambda x: x[:, :, :, :0]), "the cache has 2 kinds of pages of 0 tokens"),
    ("kv_store", numbers(4, 3, 4), "sequence 1: position 16 lies beyond its 4 pages"),
    ("kv_store", numbers(5, *TABLE, 9), "sequence 1: page 9 at position 12; the cache has 9 pages"),
    ("kv_store", numbers(7, 2), "layer 2; the cache has 2 layers"),
    ("key store", of_shape(0, 15, 31), "a row has size 31, expected 32"),
    ("key store", operand(2, lambda x: x[:, :0]), "the cache has 0 kinds of pages of 4 tokens, expected 1"),
    ("key store", numbers(1, 0, 15), "input_row_offsets has size 2, expected 3"),
    ("key store", of_shape(4, 1, 4), "lookup_table has size 1, expected 2"),
    ("key store", numbers(1, 0, 2, 14), "input_row_offsets[2] is 14, expected 15"),
    ("key store", numbers(3, 3, 4), "sequence 1: position 16 lies beyond its 4 pages"),
    ("key store", numbers(4, *TABLE, 9), "sequence 1: page 9 at position 12; the cache has 9 pages"),
    ("key store", numbers(5, 2), "layer 2; the cache has 2 layers"),
    ("cache load", numbers(0, 0, 15), "offsets has size 2, expected 3"),
    ("cache load", numbers(0, 1, 2, 15), "offsets are 1 to 15, expected 0 to at most 17"),
    ("cache load", numbers(0, 0, 2, 18), "offsets are 0 to 18, expected 0 to at most 17"),
    ("cache load", numbers(0, 0, 16, 15), "offsets[2] is 15, expected 16 or more"),
    ("cache load", operand(1, lambda x: x[:, :1]), "the cache has 1 kinds of pages of 4 tokens"),
    ("cache load", operand(1, lambda x: x[:, :, :, :0]), "the cache has 2 kinds of pages of 0 tokens"),
    ("cache load", numbers(2, 3, 4), "sequence 1: position 16 lies beyond its 4 pages"),
    ("cache load", of_shape(3, 1, 4), "lookup_table has size 1, expected 2"),
    ("cache load", numbers(3, *TABLE, 9), "sequence 1: page 9 at position 12; the cache has 9 pages"),
    ("cache load", numbers(4, 2), "layer 2; the cache has 2 layers"),
    ("cache load", numbers(5, 18), "18 rows of a result of 17"),
    ("cache load", result(0, (17, 33)), "a row has size 33, expected 32"),
    ("penalties", result(0, (2, 9)), "the result has size 2, expected 1"),
    ("penalties", result(0, (1, 8)), "the result's rows has size 8, expected 9"),
    ("penalties", of_shape(2, 1), "counts has size 1, expected 2"),
    ("penalties", numbers(3, 0, 2, 2), "offsets has size 3, expected 2"),
    ("penalties", of_shape(4, 2), "frequency penalties has size 2, expected 1"),
    ("penalties", of_shape(5, 2), "presence penalties has size 2, expected 1"),
    ("penalties", of_shape(6, 2), "repetition penalties has size 2, expected 1"),
    ("penalties", numbers(3, 0, 3), "offsets[1] is 3, expected 2 or less, the number of tokens"),
    ("penalties", numbers(3, 2, 1), "offsets[1] is 1, expected 2 or more, the one before"),
    ("penalties", numbers(1, 2, 9), "token 9 is out of range for 9 logits"),
    ("penalties", numbers(1, -1, 2), "token -1 is out of range for 9 logits"),
    ("counts of tokens", numbers(1, 0, 3), "offsets has size 2, expected 3"),
    ("counts of tokens", numbers(1, 0, 3, 2), "offsets[2] is 2, expected 3 or more, the one before"),
    ("counts of tokens", numbers(1, 0, 2, 4), "offsets end at 4; there are 3 pairs of token and count"),
    ("counts of tokens", numbers(1, 0, 3, 3), "row 1 has no free pair for token 7"),
    ("counts of tokens", numbers(2, 6, 8), "row 1 has no free pair for token 8"),
    ("checked counts", numbers(0, 2, -1, 3), "n[1] is -1, expected 0 or more"),
    ("checked counts", numbers(0, 2, 2**62 - 1, 0), f"n add up to more than {2**62}"),
    ("checked counts", numbers(0, 0, 0, 2**63 - 1), f"n add up to more than {2**62}"),
    ("checked counts", result(0, (2,)), "the result has size 2, expected 3"),
    ("checked offsets", result(0, (2,)), "the result has size 2, expected 3"),
    ("checked offsets", numbers(0, 0, 2, 4), "n[2] is 4, expected 5, the number of rows"),
    ("checked offsets", numbers(0, 0, 6, 5), "n[2] is 5, expected 6 or more, the one before"),
    ("causal convolution", numbers(3, 0, 1, 11), "input_row_offsets has size 3, expected 4"),
    ("causal convolution", numbers(3, 0, 1, 1, 10), "input_row_offsets[3] is 10, expected 11"),
    ("causal convolution", numbers(4, 2, 0), "cache_lengths has size 2, expected 3"),
    ("causal convolution", numbers(5, 3, 4, 1), "slots[1] is 4, expected less than 4, the number of states"),
    ("causal convolution", numbers(7, 2), "layer 2; the states have 2 layers"),
    ("rope", operand(2, lambda x: x[:12]), "position 12 of sequence 1; freqs_cis has 12 rows"),
    ("rope", result(0, (16, 4, 16)), "the result has size 16, expected 15"),
    ("rope", result(0, (15, 5, 16)), "the result has size 5, expected 4"),
    ("rope", result(0, (15, 4, 17)), "the result has size 17, expected 16"),
    ("rope", operand(3, lambda x: x[..., :15]), "a key has size 15, expected 16"),
    ("rope", operand(3, lambda x: x[:, :0]), "the cache has 0 kinds of pages of 4 tokens, expected 1"),
    ("rope", numbers(4, 3, 4), "sequence 1: position 16 lies beyond its 4 pages"),
    ("rope", numbers(7, 2), "layer 2; the cache has 2 layers"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"), REFUSED, ids=[f"{n}: {m}" for n, _, m in REFUSED]
)
def test_refused(name: str, change: Change, message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=re.escape(message)):
        changed(name, change)


def test_a_cache_of_keys_has_no_values() -> None:
    keys = operand(2, lambda x: x[:, :1].copy())
    changed("key store", keys)
    with pytest.raises(ValueError, match="the cache has 1 kinds of pages of 4 tokens, expected 2"):
        changed("key store", keys, side=1)
    keys = operand(1, lambda x: x[:, :1].copy())
    changed("cache load", keys, side=0)


@pytest.mark.parametrize(
    ("name", "offsets", "cache", "lengths", "table"),
    [("kv_store", 2, 3, 4, 5), ("key store", 1, 2, 3, 4), ("cache load", 0, 1, 2, 3)],
)
def test_rows_of_the_last_pages(
    name: str, offsets: int, cache: int, lengths: int, table: int
) -> None:
    """The last token of the last page; rows past the last offset are 0."""

    def change(operands: list[Array], _: list[Any]) -> None:
        for each in (numbers(lengths, 14, 3), numbers(table, 7, 8, 2, 0, 4, 5, 6, 1)):
            each(operands, [])

    for side in (0, 1):
        (_, operands, _, _) = CASES[name]
        blocks = operands[cache].copy()
        loaded, after = changed(name, change, **({} if name == "kv_store" else {"side": side}))
        rows = np.zeros((17, 32), np.float32)
        for row in range(15):
            sequence, position = (0, 14 + row) if row < 2 else (1, 3 + row - 2)
            place = (int(after[table][sequence, position // 4]), side, 1, position % 4)
            rows[row] = blocks[place].reshape(-1)
            if name != "cache load":
                blocks[place] = operands[side if name == "kv_store" else 0][row].reshape(2, 16)
        if name == "cache load":
            np.testing.assert_array_equal(loaded[0], rows)
            np.testing.assert_array_equal(after[cache], blocks)
        else:
            chosen = (slice(None), side)
            np.testing.assert_array_equal(after[cache][chosen], blocks[chosen])


def test_as_many_rows_as_the_result_has() -> None:
    offsets, lengths = numbers(0, 0, 2, 17), numbers(2, 3, 1)
    symbol, operands, results, attributes = copy.deepcopy(CASES["cache load"])
    offsets(operands, results)
    lengths(operands, results)
    (rows,) = interpreted(symbol, operands, results, attributes)
    # token 15 of the second sequence
    np.testing.assert_array_equal(rows[16], operands[1][8, 1, 1, 3].reshape(-1))


def test_penalties_of_several_rows() -> None:
    logits = np.array([[1, -0.5, 3, 0], [4, 5, -6, 7], [-8, 9, 10, 11]], np.float32)
    tokens, counts = np.array([0, 3, 1, 2, 3, 1, 0], I32), np.array([1, 2, 4, 0, 1, -1, 3], I32)
    strengths = np.array([[1, 2, 3], [10, 20, 30], [2, 4, 5]], np.float32)
    offsets = np.array([0, 3, 3, 7], U32)
    want = logits.copy()
    want[0] = [1 / 2 - 1 - 10, -0.5 * 2 - 4 - 10, 3, 0 - 2 - 10]
    want[2] = [-8 * 5 - 9 - 30, 9, 10, 11 / 5 - 3 - 30]
    for workers in (1, 2):
        (got,) = interpreted(
            "mo.penalties", [logits, tokens, counts, offsets, *strengths], [(logits.dtype, logits.shape)],
            workers=workers,
        )  # fmt: skip
        assert_close(got, want)


@pytest.mark.parametrize(
    ("pairs", "token", "expected"),
    [
        ([[3, 1]], 3, [[3, 2]]),
        ([[0, 1], [3, 1]], 0, [[0, 2], [3, 1]]),
        ([[-1, 0], [3, 1]], 3, [[-1, 0], [3, 2]]),
        ([[5, 0], [4, 1]], 3, [[3, 1], [4, 1]]),
        ([[3, 0], [4, 1], [-1, 5]], 3, [[3, 1], [4, 1], [-1, 5]]),
        ([[4, 1], [-1, 5], [2, 0]], 3, [[4, 1], [3, 1], [2, 0]]),
        ([[4, 1], [3, 1], [3, 6]], 3, [[4, 1], [3, 2], [3, 6]]),
        ([[4, 1], [5, 1], [5, -1]], 3, [[4, 1], [5, 1], [3, 1]]),
    ],
)
def test_counts_of_a_token(pairs: list[Any], token: int, expected: list[Any]) -> None:
    """In the row between two others, whose pairs hold the token, too."""
    data = np.array([[token, 7], *pairs, [token, 8]], I32)
    offsets = np.array([0, 1, 1 + len(pairs), 2 + len(pairs)], U32)
    interpreted("mo.frequencies.update", [data, offsets, np.array([token] * 3, I32)], [])
    assert data.tolist() == [[token, 8], *expected, [token, 9]]


def test_counts_and_offsets_that_fit() -> None:
    for counts in ([2, 0, 3], [0, 0, 0], [2**62, 0, 0], [1, 2**62 - 2, 1]):
        (got,), _ = changed("checked counts", numbers(0, *counts))
        assert got.tolist() == counts
    for offsets in ([0, 0, 5], [0, 5, 5]):
        (got,), _ = changed("checked offsets", numbers(0, *offsets))
        assert got.tolist() == offsets


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_each_pair_of_slots_is_compared(workers: int) -> None:
    symbol, operands, results, attributes = copy.deepcopy(CASES["causal convolution"])
    for first, second in ((0, 1), (0, 2), (1, 2)):
        slots = [3, 0, 1]
        slots[first] = slots[second]
        operands[5] = np.array(slots, U32)
        message = (
            rf"slots\[{first}\] and slots\[{second}\] are both {slots[second]}, expected a state"
        )
        with pytest.raises(ValueError, match=message):
            interpreted(symbol, operands, results, attributes, workers)


UNSIGNED = {
    "kv_store": (2, 4, 5, 6, 7), "key store": (1, 3, 4, 5), "cache load": (0, 2, 3, 4), "rope": (1, 4, 5, 6, 7),
    "penalties": (3,), "counts of tokens": (1,), "causal convolution": (3, 4, 5, 7),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSIGNED)
def test_dtypes(name: str) -> None:
    for at in UNSIGNED[name]:
        with pytest.raises(NotImplementedError, match="is si64.*, expected uint32"):
            changed(name, operand(at, lambda x: x.astype(np.int64)), checked=True)


@pytest.mark.parametrize("name", UNSIGNED)
def test_narrow_numbers(name: str) -> None:
    """Operands of several dtypes are read as what they are."""
    symbol, operands, results, attributes = copy.deepcopy(CASES[name])
    expected = changed(name, lambda *_: None)
    for dtypes in ((np.uint8, np.uint16, np.uint32), (np.uint32, np.uint8, np.uint16)):
        for at, dtype in zip(UNSIGNED[name], itertools.cycle(dtypes), strict=False):
            operands[at] = operands[at].astype(dtype)
        outputs = [np.empty(shape, dtype) for dtype, shape in results]
        for arg in lowered(symbol, operands, outputs, attributes, checked=False).args:
            if isinstance(arg, Arg) and arg.source == "operand":
                assert arg.dtype == DType.from_numpy(operands[arg.index].dtype)
        after = copy.deepcopy(operands)
        got = interpreted(symbol, after, results, attributes, checked=False)
        for ours, theirs in zip((*got, *after), itertools.chain(*expected), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("name", "cache"), [("kv_store", 3), ("key store", 2), ("cache load", 1)])
def test_rows_of_codes(name: str, cache: int) -> None:
    with pytest.raises(NotImplementedError, match="heads of 16 elements take rows of 20 in int8"):
        changed(name, operand(cache, lambda x: x.astype(np.int8)), checked=True)


def test_states() -> None:
    states = operand(6, lambda x: x.astype(np.int32))
    with pytest.raises(NotImplementedError, match="state is .*, expected float32 or bfloat16"):
        changed("causal convolution", states, checked=True)


@pytest.mark.parametrize("columns", [11, 18])
def test_columns_of_rotations(columns: int) -> None:
    changed("rope", of_shape(2, 13, 16))
    with pytest.raises(NotImplementedError, match=rf"freqs_cis is f32\[13, {columns}\]; an even"):
        changed("rope", of_shape(2, 13, columns), checked=True)


def test_rotation_without_parameters() -> None:
    """Interleaved, of queries and keys."""
    for ours, theirs in zip(
        itertools.chain(*changed("rope", lambda *_: None, interleaved=True, rotates_cache=True)),
        itertools.chain(*changed("rope without parameters", lambda *_: None)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_queries_only() -> None:
    """Keys of another size are not rotated."""
    (got,), operands = changed(
        "rope", operand(3, lambda x: x[..., :15].copy()), rotates_cache=False
    )
    (want,), _ = changed("rope", of_shape(2, 20, 12))
    assert_close(got, want)
    np.testing.assert_array_equal(operands[3], CASES["rope"][1][3][..., :15])


@pytest.mark.parametrize("shape", [("slots", "layers", 3, 5), ("slots", 2, 3), (4, 2, 7)])
def test_states_of_any_number(shape: tuple[Any, ...]) -> None:
    """Slots and layers may be sizes that a run knows."""
    batch = [Operand(DType.uint32, (n,)) for n in ("offsets", "batch", "batch")]
    layer = Operand(DType.uint32, ())
    views = state_views([*batch, Operand(DType.float32, shape), layer], 0)
    assert [v.shape for v in views] == [("offsets",), ("batch",), ("batch",), shape, (1,)]
    assert [v.index for v in views] == [0, 1, 2, 3, 4]
