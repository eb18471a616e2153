"""Modules as later releases write them, eager and compiled, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from max.dtype import DType
from max.experimental import Tensor
from max.experimental.nn import GemmaRMSNorm, GroupNorm, Linear, Module, ModuleList, RMSNorm
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
