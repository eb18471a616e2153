"""Each op of the ONNX importer on random operands and attributes: engine, interpreter and reference agree."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import max.onnx  # noqa: E402
from max import _interpreter  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.importers.onnx.importer import OnnxFramework  # noqa: E402
from tests.importers.onnx_cases import basic, others, tensors  # noqa: E402
from tests.importers.onnx_cases.case import CASES, Case, Draw  # noqa: E402

FAMILIES = (basic, tensors, others)
STRUCTURAL = {
    *("If", "Loop", "Scan"),
    *(
        "SequenceEmpty",
        "SequenceConstruct",
        "SequenceLength",
        "SequenceAt",
        "SequenceInsert",
        "SequenceErase",
    ),
    *(
        "SplitToSequence",
        "ConcatFromSequence",
        "Optional",
        "OptionalHasElement",
        "OptionalGetElement",
    ),
}
"""Ops of `test_onnx_models.py`."""
RANDOM = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
}


def model_of(name: str, case: Case) -> tuple[Any, dict[str, Any]]:
    """A model of one node, and what it is fed with."""
    domain, _, op = name.rpartition(":")
    arrays = [None if x is None else np.asarray(x) for x in case.inputs]
    names = ["" if x is None else f"x{i}" for i, x in enumerate(arrays)]
    outputs = [f"y{i}" for i in range(case.outputs)]
    attrs = {
        key: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for key, value in case.attrs.items()
    }
    node = helper.make_node(op, names, outputs, domain=domain, **attrs)
    feeds = {
        n: x
        for i, (n, x) in enumerate(zip(names, arrays, strict=True))
        if n and i not in case.constant
    }
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in feeds.items()
    ]
    constants = [numpy_helper.from_array(arrays[i], names[i]) for i in case.constant]
    results = [helper.make_empty_tensor_value_info(n) for n in outputs]
    graph = helper.make_graph([node], "case", infos, results, constants)
    opsets = [helper.make_opsetid("", case.version)]
    if domain:
        opsets.append(helper.make_opsetid(domain, {"ai.onnx.ml": 5}.get(domain, 1)))
    return helper.make_model(graph, opset_imports=opsets), feeds


def expected_of(case: Case, model: Any, feeds: dict[str, Any]) -> list[Any]:
    if case.expected is not None:
        listed = case.expected if isinstance(case.expected, list) else [case.expected]
        return [np.asarray(array) for array in listed]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return ReferenceEvaluator(model).run(None, feeds)


def assert_equal(name: str, outputs: list[Any], expected: list[Any], rtol: float) -> None:
    for got, want in zip(outputs, expected, strict=False):
        assert got.shape == want.shape, f"{name}: {got.shape}, expected {want.shape}"
        if rtol > 1:
            # codes: rounding of another sum may differ by one
            assert np.abs(got.astype(int) - want.astype(int)).max(initial=0) <= 1, name
        else:
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol, rtol * 0.1, err_msg=name
            )


def check(name: str, seed: int) -> None:
    case = CASES[name](Draw(zlib.crc32(name.encode()) + seed))
    model, feeds = model_of(name, case)
    expected = expected_of(case, model, feeds)
    try:
        graph = max.onnx.from_onnx(model)
    except max.onnx.UnsupportedOpsError:
        outputs = max.onnx.InferenceSession(model).run(None, feeds)
        assert_equal(name, outputs, expected, case.rtol)
        return
    arrays = [np.asarray(x, order="C") for x in feeds.values()]
    with np.errstate(all="ignore"):
        interpreted = _interpreter.run(graph, arrays)
    assert_equal(f"{name}, interpreted", interpreted, expected, case.rtol)
    results = InferenceSession().load(graph).execute(*arrays)
    compiled = [tensor.to_numpy() for tensor in results]
    assert_equal(f"{name}, compiled", compiled, expected, case.rtol)


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_op(name: str) -> None:
    check(name, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CASES))
def test_an_op_on_many_draws(name: str) -> None:
    for seed in range(1, 25):
        check(name, seed)


def test_each_function_has_a_case() -> None:
    assert len(FAMILIES) == 3
    known = set(CASES) | STRUCTURAL | RANDOM
    assert set(OnnxFramework.table.ops) <= known
    assert set(CASES) <= set(OnnxFramework.table.ops)
