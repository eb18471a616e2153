"""Each op of the torch importer on random arguments: engine, interpreter and torch agree."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from max import _interpreter  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.importers.build import build_graph  # noqa: E402
from max.importers.torch.importer import TorchFramework  # noqa: E402
from max.importers.torch.reader import FxReader  # noqa: E402
from max.importers.torch.table import TABLE  # noqa: E402
from tests.importers.torch_cases import layers, pointwise, quantized, tensors, vision  # noqa: E402
from tests.importers.torch_cases.case import CASES, Case, Draw  # noqa: E402

FAMILIES = (layers, pointwise, quantized, tensors, vision)
SIZES = {
    *("add", "sub", "mul", "floordiv", "mod", "neg", "truediv", "pow", "sym_max", "sym_min"),
    *("eq", "ne", "lt", "le", "gt", "ge", "sym_float", "sym_int", "sym_not", "int", "float"),
    *("trunc", "and_", "or_", "sym_size_int"),
}
"""Functions of sizes, for `test_torch_programs.py`."""
BODIES = {"cond", "while_loop"}
"""Ops with bodies, tested there too."""


def graph_of(name: str, case: Case) -> tuple[Any, list[Any], Any]:
    """An fx graph of one call, its inputs, and what torch computes."""
    if name.startswith("transformers."):
        pytest.importorskip("transformers.integrations.moe")
    packet, _, overload = name.partition(".")[2].rpartition(".")
    target = getattr(getattr(getattr(torch.ops, name.partition(".")[0]), packet), overload)
    graph = torch.fx.Graph()
    inputs: list[Any] = []
    module = torch.nn.Module()

    def placed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if case.constant:
                setattr(module, f"c{len(inputs)}", value)
                node = graph.get_attr(f"c{len(inputs)}")
            else:
                node = graph.placeholder(f"x{len(inputs)}")
            node.meta["val"] = value
            inputs.append(value)
            return node
        return [placed(item) for item in value] if isinstance(value, list) else value

    args = [placed(value) for value in case.args]
    kwargs = {key: placed(value) for key, value in case.kwargs.items()}
    expected = target(*case.args, **case.kwargs)
    node = graph.call_function(target, tuple(args), kwargs)
    node.meta["val"] = expected
    if isinstance(expected, tuple | list):
        kept = range(len(expected)) if case.only is None else case.only
        outputs = []
        for index in kept:
            part = graph.call_function(__import__("operator").getitem, (node, index))
            part.meta["val"] = expected[index]
            outputs.append(part)
        expected = [expected[index] for index in kept]
    else:
        outputs, expected = [node], [expected]
    graph.output(tuple(outputs))
    source = FxReader(graph, module, {}).read(name)
    return build_graph(source, TorchFramework()), [] if case.constant else inputs, expected


def wide(value: Any) -> Any:
    return torch.as_tensor(value).to(torch.float64).numpy()


def array(tensor: Any) -> Any:
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy(), order="C")


def compare(name: str, outputs: list[Any], expected: list[Any], rtol: float) -> None:
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        if isinstance(want, torch.Tensor):
            assert got.dtype == array(want).dtype, f"{name}: {got.dtype}, expected {want.dtype}"
        want = wide(want)
        assert got.shape == want.shape, f"{name}: {got.shape}, expected {want.shape}"
        got = got.astype(np.float64)
        np.testing.assert_allclose(got, want, rtol, rtol * 0.1, err_msg=name)


def check(name: str, seed: int) -> None:
    case = CASES[name](Draw(zlib.crc32(name.encode()) + seed))
    graph, inputs, expected = graph_of(name, case)
    arrays = [array(tensor) for tensor in inputs]
    with np.errstate(all="ignore"):
        interpreted = [np.asarray(x) for x in _interpreter.run(graph, arrays)]
    compare(f"{name}, interpreted", interpreted, expected, case.rtol)
    results = InferenceSession().load(graph).execute(*arrays)
    compare(f"{name}, compiled", [r.to_numpy() for r in results], expected, case.rtol)


@pytest.mark.parametrize("name", sorted(CASES))
def test_op(name):
    check(name, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CASES))
def test_op_draws(name):
    for seed in range(1, 13):
        check(name, seed)


def test_each_function_has_a_case():
    assert set(TABLE.ops) - SIZES - BODIES == set(CASES)
    assert SIZES | BODIES <= set(TABLE.ops)
