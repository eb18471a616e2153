"""The compiled engine against NumPy and torch, for every op of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from max.driver import CPU
from max.engine import InferenceSession
from max.graph import Graph
from tests.ops.table import CASES, IDS, PAIRS, Array, OpCase, check

SESSION = InferenceSession(devices=[CPU()])


def run(
    graph: Graph, inputs: Sequence[Array], weights: Mapping[str, Array] | None = None
) -> list[Any]:
    model = SESSION.load(graph, weights_registry=weights)
    return [output.to_numpy() for output in model.execute(*inputs)]


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=IDS)
def test_op_with_symbolic_dims(case: OpCase, dtype: str, rng: np.random.Generator) -> None:
    check(case, dtype, rng, run, symbolic=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_with_static_dims(case: OpCase, rng: np.random.Generator) -> None:
    check(case, case.dtypes[0], rng, run, symbolic=False)
