"""Activations by name and gated ones, against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from max.graph import Graph, ops
from max.nn import moe
from max.nn.activation import ACTIVATIONS, GatedActivation, activation_function_from_name
from tests.nn.harness import BACKENDS, evaluate, normal
from tests.tolerance import assert_close

functions = torch.nn.functional

TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functions.silu,
    "gelu": functions.gelu,
    "gelu_tanh": partial(functions.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functions.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: functions.relu(x) ** 2,
    "relu6": functions.relu6,
    "gelu_10": lambda x: functions.gelu(x).clamp(-10, 10),
    "hardswish": functions.hardswish,
    "sqrtsoftplus": lambda x: functions.softplus(x).sqrt(),
    "leaky_relu": functions.leaky_relu,
    "linear": lambda x: x,
    "mish": functions.mish,
    "laplace": lambda x: 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5))),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TORCH)
def test_names(rng: np.random.Generator, name: str, backend: str) -> None:
    x = normal(rng, (7, 33)) * 4
    (got,) = evaluate(activation_function_from_name(name), [x], backend)
    assert_close(got, TORCH[name](torch.from_numpy(x)).numpy(), scale=4.0)


def test_all_names_are_compared() -> None:
    assert {*ACTIVATIONS} == {*TORCH}


def test_softplus_of_large_elements(rng: np.random.Generator) -> None:
    x = np.array([-200.0, -90.0, 0.0, 90.0, 200.0], np.float32)
    (got,) = evaluate(activation_function_from_name("mish"), [x], "interpreter")
    assert_close(got, functions.mish(torch.from_numpy(x)).numpy(), scale=200.0)


@pytest.mark.parametrize("name", ["SILU", "", "swish", None, 3])
def test_other_names(name: Any) -> None:
    with pytest.raises(ValueError, match="expected one of silu, gelu, gelu_tanh"):
        activation_function_from_name(name)


def gated_pair(rng: np.random.Generator) -> tuple[Any, Any]:
    return normal(rng, (5, 9)) * 6, normal(rng, (5, 9)) * 6


def swiglu_of_gpt_oss(gate: Any, up: Any, alpha: float, limit: float) -> Any:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


GATED: dict[GatedActivation, Callable[[Any, Any], Any]] = {
    GatedActivation(): lambda g, u: functions.silu(g) * u,
    GatedActivation("gelu_tanh"): lambda g, u: functions.gelu(g, approximate="tanh") * u,
    GatedActivation(limit=2.5): lambda g, u: functions.silu(g).clamp(max=2.5) * u.clamp(-2.5, 2.5),
    GatedActivation("swigluoai", 1.7, 3.0): partial(swiglu_of_gpt_oss, alpha=1.7, limit=3.0),
    GatedActivation(gated_activation_fn=lambda x, size: x[..., :size] - x[..., size:]): torch.sub,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", GATED, ids=lambda a: f"{a.fused_activation}-{a.limit}")
def test_gated(rng: np.random.Generator, activation: GatedActivation, backend: str) -> None:
    gate, up = gated_pair(rng)
    (got,) = evaluate(activation, [gate, up], backend)
    want = GATED[activation](torch.from_numpy(gate), torch.from_numpy(up)).numpy()
    assert_close(got, want, scale=30.0)


def test_parameters_of_a_gated_activation() -> None:
    assert GatedActivation("swigluoai", 1.7, 7.0).kernel_parameters() == {
        "activation": "swigluoai", "swiglu_alpha": 1.7, "swiglu_limit": 7.0,
    }  # fmt: skip
    assert GatedActivation(limit=2.0) == GatedActivation("silu", 0.0, 2.0) != GatedActivation()
    with pytest.raises(ValueError, match="no parameters of kernels"):
        GatedActivation(gated_activation_fn=lambda x, size: x).kernel_parameters()
    for options, message in (
        ({"fused_activation": "relu"}, "'relu', expected one of silu, swigluoai, gelu_tanh"),
        ({"fused_activation": "swigluoai", "alpha": 1.0}, "needs alpha and limit"),
        ({"alpha": 1.0}, "silu takes no alpha"),
        ({"fused_activation": "gelu_tanh", "limit": 1.0}, "gelu_tanh takes no limit"),
        ({"limit": -1.0}, "the limit is -1.0, expected 0 or more"),
        ({"limit": float("nan")}, "the limit is nan, expected 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            GatedActivation(**options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_that_gate(rng: np.random.Generator, backend: str) -> None:
    gate, up = gated_pair(rng)
    silu = functions.silu(torch.from_numpy(gate)).numpy()
    both = np.concatenate([gate, up], -1)
    mixed = np.stack([gate, up], -1).reshape(5, 18)
    concatenated = moe.make_concatenated_gated_activation_fn(ops.silu)
    limited = moe.make_concatenated_gated_activation_fn(ops.silu, 2.5)
    interleaved = moe.make_interleaved_gated_activation_fn(ops.silu)
    stacked = moe.make_stacked_gated_activation_fn(ops.silu)
    got = evaluate(
        lambda a, b, g, u: [concatenated(a, 9), limited(a, 9), interleaved(b, 9), stacked(g, u)],
        [both, mixed, gate, up],
        backend,
    )
    for array, want in zip(
        got,
        [silu * up, np.minimum(silu, 2.5) * np.clip(up, -2.5, 2.5), silu * up, silu * up],
        strict=True,
    ):
        assert_close(array, want, scale=30.0)
    with Graph("wrong"):
        x = ops.constant(both)
        for function in (concatenated, interleaved):
            with pytest.raises(ValueError, match="is not twice 8"):
                function(x, 8)
    with pytest.raises(ValueError, match="the limit is -1"):
        moe.make_concatenated_gated_activation_fn(ops.silu, -1.0)
