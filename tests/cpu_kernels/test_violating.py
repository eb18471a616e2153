"""Operands that do not fit each other: kernels raise and say what would fit. See `tests.cpu_kernels.violating`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from max._config import flags
from max._interpreter import REFERENCES
from tests.cpu_kernels.harness import Runner
from tests.cpu_kernels.test_interpreted import CASES
from tests.cpu_kernels.violating import NAMES, REFUSED, check

Array = np.ndarray[Any, Any]


def operand(at: int, change: Callable[[Array], Array]) -> Callable[[list[Array], list[Any]], None]:
    """A change of an operand of a case."""

    def apply(operands: list[Array], results: list[Any]) -> None:
        operands[at] = change(operands[at])

    return apply


def result(at: int, shape: tuple[int, ...]) -> Callable[[list[Array], list[Any]], None]:
    """A change of the shape of a result of a case."""

    def apply(operands: list[Array], results: list[Any]) -> None:
        results[at] = (results[at][0], shape)

    return apply


def selected(row: Sequence[int]) -> Callable[[list[Array], list[Any]], None]:
    """Other tokens of the last row, which sees the tokens up to 12."""
    return operand(1, lambda x: np.concatenate([x[:-1], np.array([row], np.int32)]))


VIOLATIONS: list[tuple[str, Callable[[list[Array], list[Any]], None], str]] = [
    ("experts' order", result(0, (4,)), "the order of tokens has size 4, expected 5"),
    ("experts' order", result(1, (5,)), "expert_start_indices has size 5, expected 6"),
    ("experts' order", result(2, (6,)), "the places of tokens has size 6, expected 5"),
    ("experts' order", result(4, (0,)), "expert_usage_stats has size 0, expected 2"),
    ("grouped matmul", result(0, (21, 9)), "the result is f32[21, 9], expected the shape of f32[22, 9]"),
    ("grouped matmul", operand(1, lambda w: w[:, :8]), "the result is f32[22, 9], expected the shape of f32[22, 8]"),
    ("grouped matmul", operand(1, lambda w: w[..., :34]), "weight f32[5, 9, 34]; the last dimensions"),
    ("grouped Q4_0 in place", result(0, (23, 33)), "the result is f32[23, 33], expected"),
    ("grouped Q4_0 in place", operand(1, lambda w: w[:, :1]), "expected the shape of f32[22, 1]"),
    ("grouped Q4_0 in place", operand(1, lambda w: w[..., :18]), "256 elements in Q4_0 take 144 bytes"),
    ("cache load", operand(5, lambda n: n - 1), "16 rows of a result of 17"),
    ("next_step", operand(10, lambda x: x[:0]), "again has size 0, expected 1"),
    ("next_step", operand(6, lambda x: x[:, :1]), "max_lengths is buffer ui32[1, 1], expected [n, 2]"),
    ("latent prefill", operand(6, lambda x: x[..., :3]), "the queries read 4 rotated elements of a latent"),
    ("attention", operand(3, lambda n: n + 9), "lies beyond its 4 pages"),
    ("attention over latents", operand(3, lambda n: n + 9), "lies beyond its 4 pages"),
    ("cross attention", operand(8, lambda n: n + 1), "is 1, expected 0"),
    ("attention of selected tokens", selected([0, 7, 3]), "row 14: selected token 3 follows 7, expected rising"),
    ("attention of selected tokens", selected([2, 2, 3]), "row 14: selected token 2 follows 2, expected rising"),
    ("attention of selected tokens", selected([2, -1, 3]), "row 14: a selected token after 1 tokens"),
    ("attention of selected tokens", selected([-1, -1, 3]), "row 14: a selected token after 0 tokens"),
    ("attention of selected tokens", selected([0, 7, 13]), "row 14: selected token 13; it sees the tokens up to 12"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"), VIOLATIONS, ids=[m for _, _, m in VIOLATIONS]
)
def test_violations(name: str, change: Any, message: str) -> None:
    symbol, operands, results, attributes = CASES[name]
    operands, results = copy.deepcopy(operands), list(results)
    change(operands, results)
    with flags.override(MAX_KERNEL_CHECK=2), pytest.raises(REFUSED, match=re.escape(message)):
        Runner(symbol, operands, results, attributes)()


@pytest.mark.parametrize("at", [1, 3, 4])
@pytest.mark.parametrize("name", ["scan of Mamba", "scan of Mamba 2"])
def test_the_reference_refuses_operands_of_more_rows(name: str, at: int) -> None:
    symbol, operands, _, attributes = CASES[name]
    operands = copy.deepcopy(operands)
    operands[at] = np.concatenate([operands[at], operands[at][:1]])
    with pytest.raises(ValueError, match="an operand has 12 rows, expected 11"):
        REFERENCES[symbol](*operands, **attributes)


def test_a_plan_of_lengths_whose_products_exceed_64_bits() -> None:
    symbol, operands, results, attributes = CASES["latent plan"]
    lengths = np.array([0, 2**32 - 1, 0], np.uint32)
    offsets = np.array([0, 0, 1, 2**32 - 1], np.uint32)
    (plan,) = Runner(symbol, [offsets, lengths], results, attributes)()
    assert plan.tolist() == [1, 1]
    assert len(operands) == 2


@pytest.mark.parametrize("name", NAMES)
def test_drawn_violations(name: str) -> None:
    for seed in range(2):
        check(name, seed)


@pytest.mark.long
@pytest.mark.parametrize("machine", ["host", "avx2", "generic", "invariant host"])
@pytest.mark.parametrize("name", NAMES)
def test_drawn_violations_long(name: str, machine: str) -> None:
    for seed in range(1000, 1040):
        check(name, seed, machine)
