"""Hyper-connections against DeepSeek-V4's of transformers, in graphs and eager."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from max.dtype import DType
from max.experimental import Tensor
from max.experimental import nn as eager
from max.graph import Graph, TensorType, Weight
from max.nn import HyperConnection
from max.nn.kernels import hyper_connection_gates
from tests.nn.harness import BACKENDS, CPU_REF, Array, evaluate, normal

# (hidden size, streams, iterations, epsilon)
both = pytest.mark.parametrize("backend", BACKENDS)
SHAPES = [(13, 3, 7, 1e-3), (8, 4, 20, 1e-6), (5, 1, 1, 0.5), (1, 2, 2, 1e-2)]


def reference(
    rng: np.random.Generator, hidden: int, mult: int, iterations: int, eps: float
) -> tuple[Any, dict[str, Array], dict[str, Any]]:
    """transformers' module, its weights by our names, and our options."""
    config = DeepseekV4Config(
        hidden_size=hidden, hc_mult=mult, hc_sinkhorn_iters=iterations, hc_eps=eps, rms_norm_eps=1e-5
    )  # fmt: skip
    module = DeepseekV4HyperConnection(config)
    width = (2 + mult) * mult
    weights = {
        "hc_fn": normal(rng, (width, mult * hidden)),
        "hc_base": normal(rng, (width,)) * 3,
        "hc_scale": normal(rng, (3,)),
    }
    with torch.no_grad():
        for name, value in weights.items():
            getattr(module, name.removeprefix("hc_")).copy_(torch.from_numpy(value))
    options = {"hc_sinkhorn_iters": iterations, "hc_eps": eps, "rms_norm_eps": 1e-5}
    return module, weights, options


def streams_of(module: Any, x: Array) -> list[Array]:
    return [part.detach().numpy()[0] for part in module(torch.from_numpy(x)[None])]


@both
@pytest.mark.parametrize(("hidden", "mult", "iterations", "eps"), SHAPES)
def test_graphs(
    rng: np.random.Generator, backend: str, hidden: int, mult: int, iterations: int, eps: float
) -> None:
    module, weights, options = reference(rng, hidden, mult, iterations, eps)
    layer = HyperConnection(hidden, mult, CPU_REF, **options)
    layer.load_state_dict(weights)
    x = normal(rng, (7, mult, hidden))
    got = evaluate(layer, [x], backend, weights, [("n", mult, hidden)])
    for ours, theirs in zip(got, streams_of(module, x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_eager_tensors(rng: np.random.Generator) -> None:
    module, weights, options = reference(rng, *SHAPES[0])
    layer = eager.HyperConnection(13, 3, **options)
    assert repr(layer) == "HyperConnection(hidden_size=13, hc_mult=3)"
    assert {name: [*map(int, p.shape)] for name, p in layer.parameters} == {
        name: list(value.shape) for name, value in weights.items()
    }
    layer.load_state_dict(weights)
    x = normal(rng, (6, 3, 13))
    compiled = layer.compile(TensorType(DType.float32, ["n", 3, 13], CPU_REF))
    for function in (layer, compiled):
        for ours, theirs in zip(function(Tensor(x)), streams_of(module, x), strict=True):
            np.testing.assert_allclose(ours.to_numpy(), theirs, rtol=1e-5, atol=1e-5)


def test_half_streams(rng: np.random.Generator) -> None:
    module, weights, options = reference(rng, *SHAPES[1])
    layer = HyperConnection(8, 4, CPU_REF, **options)
    layer.load_state_dict(weights)
    x = normal(rng, (3, 4, 8)).astype(ml_dtypes.bfloat16)
    post, comb, collapsed = evaluate(layer, [x], "engine", weights)
    assert (post.dtype, comb.dtype, collapsed.dtype) == (np.float32, np.float32, x.dtype)
    want = streams_of(module, x.astype(np.float32))
    np.testing.assert_allclose(post, want[0], rtol=1e-5)
    np.testing.assert_array_equal(collapsed, want[2].astype(x.dtype))


@both
def test_large_logits_stay_finite(rng: np.random.Generator, backend: str) -> None:
    operands = [normal(rng, (4, 15)) * 1e4, normal(rng, (15,)), np.ones(3, np.float32)]
    for part in evaluate(lambda *a: hyper_connection_gates(*a, 3, 1e-6, 20), operands, backend):
        assert np.isfinite(part).all() and (part >= 0).all()


def test_what_does_not_fit() -> None:
    layer = HyperConnection(8, 4, CPU_REF)
    with Graph("wrong"):

        def value(*shape: int, dtype: DType = DType.float32) -> Weight:
            return Weight("w" + "x".join(map(str, shape)) + dtype.name, dtype, shape, CPU_REF)

        with pytest.raises(ValueError, match=r"expected \[tokens, hc_mult, hidden_size\]"):
            layer(value(3, 32))
        with pytest.raises(ValueError, match="the projection takes 32 elements"):
            layer(value(3, 2, 16))
        with pytest.raises(ValueError, match="the projection takes 32 elements"):
            layer(value(3, 4, 9))
        gates = (value(2, 8), value(8), value(3))
        with pytest.raises(ValueError, match="hc_sinkhorn_iters is 0, expected 1 or more"):
            hyper_connection_gates(*gates, 2, 1e-6, 0)
        with pytest.raises(TypeError, match="'hc_mult' is True"):
            hyper_connection_gates(*gates, True, 1e-6, 1)
        with pytest.raises(ValueError, match="pre_post_comb_scale .* expected 3 as the last"):
            hyper_connection_gates(gates[0], gates[1], value(4), 2, 1e-6, 1)
        with pytest.raises(ValueError, match="hc_proj .* expected 15 as the last"):
            hyper_connection_gates(*gates, 3, 1e-6, 1)
        with pytest.raises(TypeError, match="hc_proj .* expected float32"):
            hyper_connection_gates(value(2, 8, dtype=DType.float16), *gates[1:], 2, 1e-6, 1)
