"""Ensembles of trees: the tables of their kernels, against rows that go from node to node in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from max import _interpreter
from max._config import flags
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.importers.onnx.ops.contrib.forest import Forest
from max.importers.onnx.ops.contrib.tree_tables import sum_leaves
from tests.cpu_kernels.harness import run

FEATURES = 5
TESTS = (np.less_equal, np.less, np.greater_equal, np.greater)


def grown(
    rng: np.random.Generator,
    leaves: list[int],
    dtype: Any,
    modes: int = 4,
    features: int = FEATURES,
) -> Forest:
    """A forest with trees of these numbers of leaves, split at random."""
    rows: list[list[Any]] = []
    roots = []
    for count in leaves:
        roots.append(len(rows))
        rows.append([0, 0.0, -1, len(rows), len(rows), False])
        ends = [roots[-1]]
        while len(ends) < count:
            node = ends.pop(int(rng.integers(len(ends))))
            children = [len(rows), len(rows) + 1]
            rows += [[0, 0.0, -1, child, child, False] for child in children]
            # limits that elements of rows have
            limit = float(rng.integers(-3, 4)) / 2
            rows[node] = [
                int(rng.integers(features)), limit, int(rng.integers(modes)), *children, bool(rng.integers(2)),
            ]  # fmt: skip
            ends += children
    columns = list(zip(*rows, strict=True))
    kinds = (np.int64, dtype, np.int64, np.int64, np.int64, bool)
    arrays = [np.array(c, kind) for c, kind in zip(columns, kinds, strict=True)]
    return Forest(*arrays, np.array(roots, np.int64), {})


def walked(forest: Forest, x: Any, values: Any) -> Any:
    out = np.zeros((len(x), values.shape[1]))
    for i, row in enumerate(x):
        for root in forest.roots:
            node = int(root)
            while forest.modes[node] >= 0:
                value = row[forest.features[node]]
                holds = TESTS[forest.modes[node]](value, forest.values[node])
                holds = holds or (np.isnan(value) and forest.missing[node])
                node = int(forest.yes[node] if holds else forest.no[node])
            out[i] += values[node]
    return out


# rows in one vector, in two, and in memory; sums in a register, and in memory
@pytest.mark.parametrize(
    ("dtype", "features", "outputs"),
    [(np.float32, 5, 3), (np.float32, 27, 1), (np.float32, 40, 3), (np.float64, 5, 1)],
)
@pytest.mark.parametrize(
    ("leaves", "op"),
    [([1, 5, 32], "mo.trees.masks"), ([2, 33, 64], "mo.trees.masks"), ([3, 65, 200], "mo.trees.walk")],
)  # fmt: skip
def test_sums(
    leaves: list[int],
    op: str,
    dtype: Any,
    features: int,
    outputs: int,
    rng: np.random.Generator,
) -> None:
    forest = grown(rng, leaves, dtype, features=features)
    values = rng.standard_normal((len(forest.modes), outputs)).astype(dtype)
    # each tree has values of one target, or of two neighbors
    present = np.zeros(values.shape, bool)
    for first, end, at in zip(
        forest.roots, [*forest.roots[1:], len(values)], (2, 0, 1), strict=True
    ):
        at = min(at, outputs - 1)
        present[first:end, at : at + 2] = forest.modes[first:end, None] < 0
    values *= present
    kind = DType.from_numpy(np.dtype(dtype))
    types = [TensorType(kind, ["rows", features], DeviceRef.CPU())]
    with Graph("forest", input_types=types) as graph:
        result = sum_leaves(forest, graph.inputs[0].tensor, values, present)
        assert result is not None
        graph.output(result)
    assert op in str(graph)
    model = InferenceSession().load(graph)
    for rows in (0, 1, 2, 4, 7, 65, 200):
        x = (rng.integers(-4, 5, (rows, features)) / 2).astype(dtype)
        # rows without NaN go another way
        x[rng.random(x.shape) < 0.1 * (rows != 2)] = np.nan
        want = walked(forest, x, values)
        for got in (model.execute(x)[0].to_numpy(), _interpreter.run(graph, [x])[0]):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_has_no_tables(rng: np.random.Generator) -> None:
    """Tests for equality, limits without a number before them, other dtypes."""
    types = [TensorType(DType.float32, ["rows", FEATURES], DeviceRef.CPU())]
    with Graph("forest", input_types=types) as graph:
        x = graph.inputs[0].tensor
        for change in ("mode", "nan", "inf", "dtype", "none"):
            forest = grown(rng, [4, 9], np.float32, 1)
            inner = int(np.flatnonzero(forest.modes >= 0)[0])
            values = np.ones((len(forest.modes), 1), np.float32)
            match change:
                case "mode":
                    forest.modes[inner] = 4
                case "nan":
                    forest.values[inner] = np.nan
                case "inf":
                    forest.modes[inner], forest.values[inner] = 1, -np.inf
                case "dtype":
                    forest.values = forest.values.astype(np.float64)
                case _:
                    pass
            found = sum_leaves(forest, x, values, values > 0)
            assert (found is None) == (change != "none")
        graph.output(x)


def tables(rng: np.random.Generator) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Operands of both ops for 19 rows."""
    x = rng.standard_normal((19, FEATURES)).astype(np.float32)
    limits = rng.standard_normal((2, 3)).astype(np.float32)
    masks = [
        x,
        rng.integers(0, FEATURES, (2, 3)).astype(np.int32),
        limits,
        np.array([[0, 1, 0], [1, 0, 0]], np.uint8),
        # bits of four leaves, and of three
        np.array([[~3, ~1, ~4], [~3, ~1, ~0]], np.int64).astype(np.uint32),
        np.array([3, 2], np.int32),
        rng.standard_normal((2, 4, 2)).astype(np.float32),
        np.array([1, 0], np.int32),
    ]
    walk = [
        x,
        np.array([1, 4, 0, 0, 0], np.int32),
        rng.standard_normal(5).astype(np.float32),
        np.array([1, 0, 0, 0, 0], np.uint8),
        np.array([1, 2, 2, 3, 4], np.int32),
        np.array([4, 3, 2, 3, 4], np.int32),
        np.array([0, 0, 0, 1, 2], np.int32),
        np.array([0, 1], np.int32),
        np.array([2, 1], np.int32),
        rng.standard_normal((3, 2)).astype(np.float32),
        np.array([1, 0], np.int32),
    ]
    return {"mo.trees.masks": (masks, {"outputs": 3}), "mo.trees.walk": (walk, {"outputs": 3})}


BAD = [
    *(("mo.trees.masks", at, value) for at, value in ((1, FEATURES), (1, -1), (5, 4), (5, -1), (7, 2), (7, -1))),
    ("mo.trees.masks", 4, 0),
    *(
        ("mo.trees.walk", at, value)
        for at, value in ((1, FEATURES), (1, -1), (4, 5), (5, -1), (6, 3), (6, -1), (7, 5), (7, -1), (10, 2), (10, -1))
    ),
]  # fmt: skip


def test_few_rows_are_no_work_to_share(rng: np.random.Generator) -> None:
    forest = grown(rng, [31] * 60, np.float32)
    values = np.ones((len(forest.modes), 1), np.float32)
    types = [TensorType(DType.float32, ["rows", FEATURES], DeviceRef.CPU())]
    with Graph("forest", input_types=types) as graph:
        result = sum_leaves(forest, graph.inputs[0].tensor, values, values > 0)
        assert result is not None
        graph.output(result)
    with flags.override(MAX_RUN_ALONE=True):
        linked = InferenceSession().load(graph)._linked  # pyright: ignore[reportPrivateUsage]
    assert linked is not None
    assert linked.main.instance((1,)).alone and not linked.main.instance((10_000,)).alone


@pytest.mark.parametrize(("op", "at", "value"), BAD)
@pytest.mark.parametrize("machine", ["host", "avx2"])
def test_an_index_outside_of_the_tables(
    op: str, at: int, value: int, machine: str, rng: np.random.Generator
) -> None:
    operands, attributes = tables(rng)[op]
    x, broken = operands[0], operands[at].copy()
    broken[...] = value
    # many rows as vectors, few one by one
    for rows in (19, 2):
        operands[0] = x[:rows]
        results = [(np.dtype(np.float32), (rows, 3))]
        (got,) = run(op, operands, results, attributes, machine=machine)
        want = _interpreter.REFERENCES[op](*operands, **attributes)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        wrong = [broken if i == at else operand for i, operand in enumerate(operands)]
        with pytest.raises(IndexError):
            run(op, wrong, results, attributes, machine=machine)
        with pytest.raises(IndexError):
            _interpreter.REFERENCES[op](*wrong, **attributes)


@pytest.mark.parametrize(("at", "value"), [case[1:] for case in BAD if case[0] == "mo.trees.masks"])
def test_a_bad_index_of_trees_with_one_output(
    at: int, value: int, rng: np.random.Generator
) -> None:
    """A row without NaN takes a way of its own."""
    operands, _ = tables(rng)["mo.trees.masks"]
    operands[0], operands[6] = operands[0][:2], operands[6][..., :1].copy()
    operands[7] = np.zeros(2, np.int32)
    results: list[Any] = [(np.dtype(np.float32), (2, 1))]
    (got,) = run("mo.trees.masks", operands, results, {"outputs": 1})
    want = _interpreter.REFERENCES["mo.trees.masks"](*operands, outputs=1)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    operands[at] = np.full_like(operands[at], value)
    with pytest.raises(IndexError):
        run("mo.trees.masks", operands, results, {"outputs": 1})
