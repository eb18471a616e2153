"""`Identity`, `MissingLayer`, and modules that are named, replaced or left out of names."""

from __future__ import annotations

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import Tensor
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.nn import Identity, LayerList, Linear, MissingLayer, Module
from max.nn import module_v3 as eager
from max.nn.layer import MissingLayer as LayerMissing

CPU_REF = DeviceRef.CPU()


def linear() -> Linear:
    return Linear(2, 2, DType.float32, CPU_REF)


class Tower(Module):
    def __init__(self) -> None:
        self.first = linear()
        self.layers = LayerList([MissingLayer(0), linear(), Identity()])
        self.again = self.first

    def __call__(self, x: TensorValue) -> TensorValue:
        return self.layers[2](self.layers[1](self.first(x)))


def test_named_modules() -> None:
    """Each once, breadth first, as 26.7 lists them."""
    named = [(prefix, type(module).__name__) for prefix, module in Tower().named_modules()]
    assert named == [
        ("", "Tower"),
        ("first.", "Linear"),
        ("layers.", "LayerList"),
        ("layers.0.", "MissingLayer"),
        ("layers.1.", "Linear"),
        ("layers.2.", "Identity"),
    ]


def test_missing_layers_keep_names_and_do_not_run() -> None:
    model = Tower()
    assert LayerMissing is MissingLayer
    assert set(model.raw_state_dict()) == {"first.weight", "layers.1.weight"}
    with pytest.raises(RuntimeError, match="layer 0 is a MissingLayer"):
        model.layers[0](1)


def test_replaced_modules_compute(rng: np.random.Generator) -> None:
    model = Tower()
    model.replace_module("first", Identity())
    weight = rng.standard_normal((2, 2)).astype(np.float32)
    given = rng.standard_normal((3, 2)).astype(np.float32)
    del model.again
    model.load_state_dict({"layers.1.weight": weight})
    graph = Graph("tower", model, input_types=[TensorType(DType.float32, (3, 2), CPU_REF)])
    session = InferenceSession(devices=[CPU()])
    (got,) = session.load(graph, weights_registry=model.state_dict()).execute(given)
    np.testing.assert_allclose(got.to_numpy(), given @ weight.T, rtol=1e-5, atol=1e-6)
    with pytest.raises(KeyError, match="has no part 'last'; its parts are first, layers"):
        model.replace_module("last", Identity())
    with pytest.raises(TypeError, match="'first' is 3, expected a Module"):
        model.replace_module("first", 3)


class Wrapped(eager.TransparentModule):
    def __init__(self) -> None:
        self.inner = eager.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Outer(eager.Module):
    def __init__(self) -> None:
        self.wrapped = Wrapped()
        self.last = eager.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wrapped(x))


NAMES = ["inner.weight", "inner.bias", "last.weight", "last.bias"]


def test_transparent_modules_leave_out_their_names(rng: np.random.Generator) -> None:
    model = Outer()
    assert [name for name, _ in model.parameters] == NAMES
    assert [name for name, _ in model.descendants] == ["wrapped", "inner", "last"]
    state = {
        name: rng.standard_normal([int(d) for d in tensor.shape]).astype(np.float32)
        for name, tensor in model.parameters
    }
    model.load_state_dict(state)
    x = rng.standard_normal((4, 2)).astype(np.float32)
    hidden = x @ state["inner.weight"].T + state["inner.bias"]
    want = hidden @ state["last.weight"].T + state["last.bias"]
    compiled = model.compile(TensorType(DType.float32, (4, 2), CPU_REF))
    for run in (model, compiled):
        np.testing.assert_allclose(
            run(Tensor.from_dlpack(x)).to_numpy(), want, rtol=1e-4, atol=1e-5
        )
    seen: list[str] = []
    doubled = model.map_parameters(lambda name, tensor: (seen.append(name), tensor * 2)[1])
    assert seen == NAMES
    np.testing.assert_allclose(
        doubled.wrapped.inner.weight.to_numpy(), 2 * state["inner.weight"], rtol=1e-6
    )
    model.wrapped.name_transparent = False
    assert [name for name, _ in model.parameters][:2] == [
        "wrapped.inner.weight",
        "wrapped.inner.bias",
    ]


def test_names_that_collide_are_an_error() -> None:
    model = Outer()
    model.inner = eager.Linear(2, 3)
    with pytest.raises(ValueError, match="two parameters of Outer have the name 'inner.weight'"):
        list(model.parameters)


def test_sequential_is_a_list(rng: np.random.Generator) -> None:
    model = eager.Sequential(eager.Linear(2, 3))
    model.append(eager.Linear(3, 2))
    model.insert(0, eager.Linear(2, 2))
    assert isinstance(model, eager.ModuleList) and len(model) == 3
    assert [name for name, _ in model.parameters][::2] == ["0.weight", "1.weight", "2.weight"]
    x = want = rng.standard_normal((4, 2)).astype(np.float32)
    for layer in model:
        want = want @ layer.weight.to_numpy().T + layer.bias.to_numpy()
    np.testing.assert_allclose(model(Tensor.from_dlpack(x)).to_numpy(), want, rtol=1e-4, atol=1e-5)
    assert len(model.map_parameters(lambda _, tensor: tensor)) == 3
    assert model.pop() is not model[-1] and model.modules == list(model)
