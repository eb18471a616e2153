"""The interpreter against NumPy and torch, for every op of the table."""

from __future__ import annotations

import numpy as np
import pytest

from max import _interpreter, mlir
from tests.ops.table import CASES, IDS, PAIRS, OpCase, check, inputs_of, stage


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=IDS)
def test_op(case: OpCase, dtype: str, symbolic: bool, rng: np.random.Generator) -> None:
    for _ in range(2):
        check(case, dtype, rng, _interpreter.run, symbolic=symbolic)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graph_of_op_verifies_and_round_trips(case: OpCase, rng: np.random.Generator) -> None:
    module = stage(case, inputs_of(case, case.dtypes[0], rng), symbolic=True).to_mlir()
    mlir.verify_module(module)
    text = mlir.print_module(module)
    again = mlir.parse_module(text, mlir.resources(module))
    assert again.is_structurally_equivalent(module)
    assert mlir.print_module(again) == text
