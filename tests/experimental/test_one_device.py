"""What tensors and modules of later releases tell, which here are on one device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from max.dtype import DType
from max.experimental import Tensor
from max.experimental import functional as F
from max.experimental.nn import LayerNorm, Linear
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops


def test_a_tensor_is_its_only_part() -> None:
    x = Tensor([1.0, 2.0, 3.0]) * 2
    assert not x.is_distributed and x.num_shards == 1 and x.local_shards == (x,)
    assert x.materialize() is x and x.real
    (buffer,) = x.buffers
    assert buffer.to_numpy().tolist() == [2.0, 4.0, 6.0]
    shown = dict(x.__rich_repr__())
    assert shown == {"shape": x.shape, "dtype": DType.float32, "device": x.device}
    lazy = Tensor([1.0]) + 1
    list(lazy.__rich_repr__())
    assert not lazy.real
    with pytest.raises(LookupError, match="no graph is being built"):
        _ = x.graph_values


def test_the_value_of_a_tensor_in_a_graph() -> None:
    types = [
        TensorType(DType.float32, (2,), DeviceRef.CPU()),
        BufferType(DType.float32, (2,), DeviceRef.CPU()),
    ]
    with Graph("values", input_types=types) as graph:
        for value in graph.inputs:
            assert Tensor.from_graph_value(value).graph_values[0] is value
        (constant,) = Tensor([1.0, 2.0]).graph_values
        assert list(constant.shape) == [2]
        with pytest.raises(TypeError):
            _ = Tensor.from_graph_value(graph.inputs[0]).buffers
        graph.output(constant)


def test_functional_by_its_later_keyword() -> None:
    assert F.functional(graph_op=ops.negate)(Tensor([2.0])).item() == -2.0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["weight", "bias"]),
        ({"use_bias": False}, ["weight"]),
        ({"elementwise_affine": False}, []),
        ({"elementwise_affine": False, "use_bias": True}, []),
    ],
)
@pytest.mark.parametrize("keep_dtype", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norm(
    options: dict[str, bool], names: list[str], keep_dtype: bool, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    layer = LayerNorm(7, 1e-3, keep_dtype=keep_dtype, **options)
    assert [name for name, _ in layer.parameters] == names and layer.dim == 7
    state = {name: rng.standard_normal(7).astype(np.float32) for name in names}
    layer.load_state_dict(state)
    x = rng.standard_normal((5, 7)).astype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
    parameters: list[Any] = [
        torch.from_numpy(state[name]) if name in state else None for name in ("weight", "bias")
    ]
    want = torch.nn.functional.layer_norm(
        torch.from_numpy(x.astype(np.float32)), (7,), *parameters, 1e-3
    ).numpy()
    compiled = layer.compile(TensorType(DType.from_numpy(x.dtype), ["n", 7], DeviceRef.CPU()))
    tolerance = 1e-5 if dtype == "float32" else 0.03
    for function in (layer, compiled):
        got = function(Tensor(x))
        assert got.dtype is DType.from_numpy(x.dtype)
        np.testing.assert_allclose(
            got.to_numpy().astype(np.float32), want, rtol=tolerance, atol=tolerance
        )
    with pytest.raises(ValueError):
        layer(Tensor(x[:, :6]))


def test_a_layer_tells_what_it_is_to_rich() -> None:
    assert list(Linear(3, 2).__rich_repr__()) == [("in_dim", 3), ("out_dim", 2)]
    linear = Linear(3, 2)
    x = TensorType(DType.float32, (1, 3), DeviceRef.CPU())
    assert str(linear.trace(x, allow_subgraphs=False)) == str(linear.trace(x))
