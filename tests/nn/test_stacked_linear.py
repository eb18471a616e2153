"""`StackedLinear`, `FusedMLP`, and `compile` and `trace` of modules, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, TensorType, TensorValue
from max.nn import MLP, FusedMLP, Linear, Module, StackedLinear
from max.nn.linear import FusedMLP as FusedMLPOfLinear

REF = DeviceRef.CPU()
F32 = DType.float32
SESSION = InferenceSession(devices=[CPU()])
NAMES = ["q_proj", "k_proj", "v_proj"]
SIZES = [6, 2, 3]


class Block(Module):
    def __init__(self, **kwargs: Any) -> None:
        self.qkv_proj = StackedLinear(5, SIZES, NAMES, F32, REF, **kwargs)
        self.out = Linear(11, 4, F32, REF)

    def __call__(self, x: TensorValue) -> list[TensorValue]:
        y = self.qkv_proj(x)
        return [y, self.out(y)]


def x_type(*shape: int | str) -> TensorType:
    return TensorType(F32, shape, REF)


def weights_of(module: Module, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: rng.standard_normal([int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in module.raw_state_dict().items()
    }


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_stacked_linear(
    stacked: bool, bias: bool, clip: float | None, rng: np.random.Generator
) -> None:
    module = Block(stacked=stacked, has_bias=bias, clip_weight=clip)
    values = weights_of(module, rng)
    kinds = ["weight", "bias"] if bias else ["weight"]
    parts = ["qkv_proj"] if stacked else NAMES
    assert set(values) == {*[f"{part}.{kind}" for part in parts for kind in kinds], "out.weight"}
    module.load_state_dict(values)
    x = rng.standard_normal((3, 7, 5)).astype(np.float32)
    got, out = module.compile(x_type("batch", "length", 5), session=SESSION).execute(x)
    weight = np.concatenate([values[f"{part}.weight"] for part in parts])
    if clip is not None:
        weight = weight.clip(-clip, clip)
    want = x @ weight.T
    if bias:
        want = want + np.concatenate([values[f"{part}.bias"] for part in parts])
    np.testing.assert_allclose(got.to_numpy(), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.to_numpy(), want @ values["out.weight"].T, rtol=1e-4, atol=1e-4)


def test_projections_that_do_not_fit() -> None:
    for sizes, names in (([], []), ([2, 3], ["a"]), ([2, 3], ["a", "a"])):
        with pytest.raises(ValueError, match="expected one name of its own"):
            StackedLinear(5, sizes, names, F32, REF)
    with pytest.raises(ValueError, match="'compile' is an attribute"):
        StackedLinear(5, [2], ["compile"], F32, REF)


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_fused_mlp(activation: str, rng: np.random.Generator) -> None:
    assert FusedMLPOfLinear is FusedMLP
    module = FusedMLP(F32, 5, 9, [REF], activation_function=activation)
    values = weights_of(module, rng)
    assert {name: value.shape for name, value in values.items()} == {
        "gate_up_proj_fused": (18, 5), "down_proj.weight": (5, 9)
    }  # fmt: skip
    x = rng.standard_normal((4, 5)).astype(np.float32)
    model = module.compile(x_type(4, 5), session=SESSION, weights=values, name="fused")
    gate, up = np.split(x @ values["gate_up_proj_fused"].T, 2, axis=-1)
    gate = np.maximum(gate, 0) if activation == "relu" else gate / (1 + np.exp(-gate))
    want = (gate * up) @ values["down_proj.weight"].T
    np.testing.assert_allclose(model.execute(x)[0].to_numpy(), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no device"):
        FusedMLP(F32, 5, 9, [])
    with pytest.raises(ValueError, match="activation is 'step'"):
        FusedMLP(F32, 5, 9, [REF], activation_function="step")


@pytest.mark.parametrize("kind", [FusedMLP, MLP])
def test_limited_factors(kind: Any, rng: np.random.Generator) -> None:
    rest = (None, 5, 9) if kind is MLP else (5, 9)
    module = kind(F32, *rest, [REF], swiglu_limit=0.75)
    layer = Tail(module)
    values = weights_of(layer, rng)
    x = rng.standard_normal((4, 5)).astype(np.float32) * 3
    if kind is MLP:
        both = [values[f"mlp.{name}.weight"] for name in ("gate_proj", "up_proj")]
    else:
        both = np.split(values["mlp.gate_up_proj_fused"], 2)
    gate, up = (x @ weight.T for weight in both)
    gate = np.minimum(gate / (1 + np.exp(-gate)), 0.75)
    want = (gate * np.clip(up, -0.75, 0.75)) @ values["mlp.down_proj.weight"].T
    model = layer.compile(x_type(4, 5), session=SESSION, weights=values, name="limited")
    np.testing.assert_allclose(model.execute(x)[0].to_numpy(), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="the limit is -1"):
        kind(F32, *rest, [REF], swiglu_limit=-1)


class Tail(Module):
    """A module around another one, which names its weights."""

    def __init__(self, mlp: Module) -> None:
        super().__init__()
        self.mlp = mlp

    def __call__(self, x: TensorValue) -> TensorValue:
        return self.mlp(x)


def test_trace_and_wrong_weights(rng: np.random.Generator) -> None:
    module = Block()
    module.name_weights()
    graph = module.trace(x_type(2, 5))
    assert graph.name == "Block" and len(graph.inputs) == 1
    assert module.trace(x_type(2, 5), name="other").name == "other"
    values = weights_of(module, rng)
    del values["k_proj.weight"]
    with pytest.raises(ValueError, match=r"k_proj\.weight"):
        module.compile(x_type(2, 5), session=SESSION, weights=values)
    with pytest.raises(TypeError):
        module.compile(x_type(2, 5), x_type(2, 5), session=SESSION)
