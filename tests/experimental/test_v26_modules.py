"""Modules as later releases write them, eager and compiled, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import Tensor
from max.experimental.nn import (
    Conv2d,
    GemmaRMSNorm,
    GroupNorm,
    Linear,
    Module,
    ModuleList,
    PinnedDeviceTensor,
    RMSNorm,
    RotaryEmbedding,
    TransposedRotaryEmbedding,
    as_subgraph,
    module_dataclass,
)
from max.graph import DeviceRef, TensorType


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def check(module: Module, x: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    sizes = ["n", *x.shape[1:]]
    compiled = module.compile(TensorType(DType.float32, sizes, DeviceRef.CPU()))
    tensor = Tensor.from_dlpack(x)
    for function in (module, module.forward, compiled):
        np.testing.assert_allclose(function(tensor).to_numpy(), want, rtol=1e-5, atol=1e-5)


class Tower(Module):
    """Linear layers, each of which is added to its operand."""

    def __init__(self, count: int, dim: int) -> None:
        self.layers = ModuleList([Linear(dim, dim) for _ in range(count)])
        self.layers.append(Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_forward_and_lists_of_modules() -> None:
    tower = Tower(2, 5)
    names = [name for name, _ in tower.parameters]
    assert names == [f"layers.{i}.{part}" for i in range(3) for part in ("weight", "bias")]
    x = floats(3, 5)
    want = x
    for layer in tower.layers:
        assert isinstance(layer, Linear) and isinstance(layer.bias, Tensor)
        want = want + want @ layer.weight.to_numpy().T + layer.bias.to_numpy()
    check(tower, x, want)
    doubled = tower.map_parameters(lambda _, tensor: tensor * 2)
    np.testing.assert_allclose(
        doubled.layers[1].weight.to_numpy(), 2 * tower.layers[1].weight.to_numpy(), rtol=1e-6
    )
    with pytest.raises(TypeError, match="Tower.compile"):
        tower.compile()


def test_parts_as_subgraphs() -> None:
    """A part that is marked computes what it does without, eager and compiled, whatever it is."""

    class Marked(Tower):
        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = x + as_subgraph(layer, name="layer", prefix=f"layers.{number}.")(x)
            return as_subgraph(lambda a, by: (a * by, a))(x, by=2.0)[0]

    plain, marked = Tower(3, 4), Marked(3, 4)
    weights = {name: floats(*map(int, value.shape)) for name, value in plain.parameters}
    for tower in (plain, marked):
        tower.load_state_dict(weights)
    x = floats(5, 4)
    check(marked, x, plain(Tensor.from_dlpack(x)).to_numpy() * 2)
    assert as_subgraph(floats).__name__ == "floats"
    refused: Any = as_subgraph
    with pytest.raises(TypeError, match="3 is a int, expected a function or a module"):
        refused(3)
    with pytest.raises(TypeError, match="prefix is 4, expected text"):
        refused(floats, prefix=4)


def test_tensors_that_stay_on_their_device() -> None:
    @module_dataclass
    class Scaled(Module):
        weight: PinnedDeviceTensor
        by: float

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.by

    scale, x = floats(4), floats(3, 4)
    module = Scaled(Tensor.from_dlpack(scale), 2.0)
    assert [name for name, _ in module.parameters] == ["weight"]
    check(module, x, x * scale * 2)


def test_a_module_that_defines_neither() -> None:
    class Empty(Module):
        pass

    for call in (Empty(), Empty().forward):
        with pytest.raises(NotImplementedError, match="Empty does not define __call__"):
            call(Tensor.ones((2,)))


@pytest.mark.parametrize(("norm", "offset"), [(RMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_rms_norms(norm: Callable[..., RMSNorm], offset: float) -> None:
    x, weight = floats(3, 7), floats(7)
    module = norm(7, eps=1e-3)
    first = module(Tensor.from_dlpack(x)).to_numpy()
    plain = torch.nn.functional.rms_norm(torch.from_numpy(x), (7,), eps=1e-3).numpy()
    np.testing.assert_allclose(first, plain, rtol=1e-5, atol=1e-6)
    module.load_state_dict({"weight": weight})
    check(module, x, plain * (weight + np.float32(offset)))


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(affine: bool) -> None:
    x = floats(2, 6, 3, 5)
    module, reference = GroupNorm(3, 6, 1e-3, affine), torch.nn.GroupNorm(3, 6, 1e-3, affine)
    if affine:
        state = {"weight": floats(6), "bias": floats(6) + 1}
        module.load_state_dict(state)
        reference.load_state_dict({name: torch.from_numpy(a) for name, a in state.items()})
    assert [name for name, _ in module.parameters] == (["weight", "bias"] if affine else [])
    check(module, x, reference(torch.from_numpy(x)).detach().numpy())
    with pytest.raises(ValueError, match="cannot be divided into 4 groups"):
        GroupNorm(4, 6)
    with pytest.raises(ValueError, match="group_norm"):
        module(Tensor.ones((2, 5, 3)))


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1, "has_bias": True},
        {"kernel_size": (3, 2), "stride": (2, 1), "dilation": 2, "num_groups": 2},
        {"kernel_size": (1, 3), "padding": (0, 2), "num_groups": 2, "has_bias": True},
    ],
)
def test_conv2d(permute: bool, options: dict[str, Any]) -> None:
    layer = Conv2d(in_channels=4, out_channels=6, permute=permute, **options)
    assert not isinstance(layer.bias, Tensor) or layer.bias.shape == [6]
    image = floats(2, 9, 12, 4)
    weight = torch.from_numpy(layer.weight.to_numpy().copy())
    want = torch.nn.functional.conv2d(
        torch.from_numpy(image).permute(0, 3, 1, 2),
        weight if permute else weight.permute(3, 2, 0, 1),
        torch.from_numpy(layer.bias.to_numpy().copy()) if layer.has_bias else None,
        stride=options.get("stride", 1),
        padding=options.get("padding", 0),
        dilation=options.get("dilation", 1),
        groups=options.get("num_groups", 1),
    ).numpy()
    if permute:
        check(layer, np.ascontiguousarray(image.transpose(0, 3, 1, 2)), want)
    else:
        check(layer, image, want.transpose(0, 2, 3, 1))


def test_paddings_of_conv2d_and_wrong_arguments() -> None:
    layer = Conv2d(3, 2, 4, padding=(1, 2, 3, 4), dtype=DType.float32, name="stem")
    assert layer.padding == (1, 2, 3, 4) and "stem" in repr(layer)
    assert layer(Tensor.ones([1, 9, 12, 2])).shape == [1, 10, 17, 4]
    for options, message in [
        ({"num_groups": 2, "in_channels": 5}, "multiples of num_groups"),
        ({"num_groups": 0}, "num_groups"),
        ({"padding": (1, 2, 3)}, "padding"),
        ({"stride": (1, 1, 1)}, "stride"),
        ({"kernel_size": 0}, "kernel_size"),
    ]:
        with pytest.raises(ValueError, match=message):
            Conv2d(**{"kernel_size": 3, "in_channels": 4, "out_channels": 6} | options)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("cls", [RotaryEmbedding, TransposedRotaryEmbedding])
def test_rotary_embeddings(cls: type[RotaryEmbedding], start: int) -> None:
    angles = np.outer(np.arange(12), 1.0 / 100 ** np.linspace(0, 1, 4))
    table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    rope = cls(Tensor.from_dlpack(table))
    assert rope.dim == 8 and rope.max_sequence_length == 12
    x = floats(2, 6, 3, 8)
    real, imaginary = (
        (x[..., ::2], x[..., 1::2]) if cls is RotaryEmbedding else (x[..., :4], x[..., 4:])
    )
    turned = (real + 1j * imaginary) * np.exp(1j * angles[start : start + 6])[None, :, None]
    parts = np.stack([turned.real, turned.imag], -1 if cls is RotaryEmbedding else -2)
    want = parts.reshape(x.shape)

    class Positions(Module):
        def __init__(self) -> None:
            self.rope = rope

        def forward(self, x: Tensor) -> Tensor:
            return self.rope(x, start)

    check(Positions(), x, want)
    compiled = Positions().compile(TensorType(DType.float32, ["n", "s", 3, 8], DeviceRef.CPU()))
    for shape in ([2, 13 - start, 3, 8], [1, 100, 3, 8]):
        with pytest.raises(ValueError):
            rope(Tensor.ones(shape), start)
        with pytest.raises(ValueError):
            compiled(Tensor.ones(shape))
    for shape in ([2, 6, 3, 6], [6, 3, 8]):
        with pytest.raises(ValueError, match="expected \\[batch"):
            rope(Tensor.ones(shape))
    with pytest.raises(ValueError, match="weight has shape"):
        cls(Tensor.ones([12, 4]))


def test_weights_of_compile_and_casts() -> None:
    linear = Linear(3, 2)
    before = linear.weight.to_numpy().copy()
    state = {"weight": floats(2, 3), "bias": floats(2)}
    kind = TensorType(DType.float32, ["n", 3], DeviceRef.CPU())
    x = floats(4, 3)
    run = linear.compile(kind, weights=state, name="given", session=InferenceSession())
    want = x @ state["weight"].T + state["bias"]
    np.testing.assert_allclose(run(x).to_numpy(), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(linear.weight.to_numpy(), before)
    with pytest.raises(KeyError, match="no value for 'bias'"):
        linear.compile(kind, weights={"weight": state["weight"]})
    with pytest.raises(ValueError, match="no parameter has the name 'scale'"):
        linear.compile(kind, weights={**state, "scale": state["bias"]})
    with pytest.raises(ValueError, match="bias has shape \\[3\\]"):
        linear.compile(kind, weights={**state, "bias": floats(3)})
    half = {name: Tensor.from_dlpack(value).cast(DType.bfloat16) for name, value in state.items()}
    with pytest.raises(ValueError, match="dtype bfloat16, expected \\[2, 3\\] and float32"):
        linear.load_state_dict(half)
    rounded = (
        half["weight"].cast(DType.float32).to_numpy(),
        half["bias"].cast(DType.float32).to_numpy(),
    )
    want = x @ rounded[0].T + rounded[1]
    run = linear.compile(kind, weights=half, auto_cast=True)
    np.testing.assert_allclose(run(x).to_numpy(), want, rtol=1e-5, atol=1e-6)
    linear.load_state_dict(half, auto_cast=True)
    np.testing.assert_allclose(linear(Tensor.from_dlpack(x)).to_numpy(), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="dtype int32"):
        linear.load_state_dict({**state, "bias": np.ones(2, np.int32)}, auto_cast=True)


def test_trace_is_the_graph_of_compile() -> None:
    linear = Linear(3, 2)
    kind = TensorType(DType.float32, ["n", 3], DeviceRef.CPU())
    graph = linear.trace(kind, name="traced")
    assert "traced" in str(graph) and '"weight"' in str(graph)
    registry = {name: tensor.to_numpy() for name, tensor in linear.parameters}
    model = InferenceSession().load(graph, weights_registry=registry)
    x = floats(4, 3)
    want = linear(Tensor.from_dlpack(x)).to_numpy()
    np.testing.assert_allclose(model.execute(x)[0].to_numpy(), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match="Linear.trace: .* a type for each argument"):
        linear.trace()
