"""Modules: names of weights, state dicts, subgraphs, hooks, text."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from max import nn
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, TensorType, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import WeightData
from tests.nn.harness import BACKENDS, CPU_REF, Array, run_graph
from tests.tolerance import assert_close


class OwnLinear(nn.Module):
    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = Weight("weight", DType.float32, (in_dim, out_dim), CPU_REF)

    def __call__(self, x: TensorValue) -> TensorValue:
        return x @ self.weight


class OwnMLP(nn.Module):
    def __init__(self) -> None:  # as in the reference: without super().__init__()
        self.up = OwnLinear(5, 10)
        self.gate = OwnLinear(5, 10)
        self.down = OwnLinear(10, 5)

    def __call__(self, x: TensorValue) -> TensorValue:
        return self.down(ops.silu(self.gate(x)) + self.up(x))


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        self.blocks = nn.LayerList([OwnMLP() for _ in range(count)])
        self.scale = Weight("scale", DType.float32, [5], CPU_REF)

    def __call__(self, x: TensorValue) -> TensorValue:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def values_of(module: nn.Module, rng: np.random.Generator) -> dict[str, Array]:
    return {
        name: 0.4 * rng.standard_normal([int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in module.raw_state_dict().items()
    }


def mlp(x: Array, values: dict[str, Array], prefix: str = "") -> Array:
    gate = x @ values[f"{prefix}gate.weight"]
    hidden = gate / (1 + np.exp(-gate)) + x @ values[f"{prefix}up.weight"]
    return hidden @ values[f"{prefix}down.weight"]


def test_weights_are_named_by_path() -> None:
    names = {f"blocks.{i}.{part}.weight" for i in range(2) for part in ("up", "gate", "down")}
    assert set(Stack(2).raw_state_dict()) == names | {"scale"}
    assert set(Stack(2).sublayers) == {"blocks"}
    assert set(Stack(2).layer_weights) == {"scale"}


def test_state_dict_names_weights_and_makes_zeros() -> None:
    model = OwnMLP()
    state = model.state_dict()
    assert {name: Tensor.from_dlpack(v).shape for name, v in state.items()} == {
        "up.weight": (5, 10),
        "gate.weight": (5, 10),
        "down.weight": (10, 5),
    }
    assert not any(Tensor.from_dlpack(v).to_numpy().any() for v in state.values())
    assert model.gate.weight.name == "gate.weight"
    # the same objects again, not new ones
    assert model.state_dict()["up.weight"] is state["up.weight"]


def test_state_dict_without_values_raises() -> None:
    with pytest.raises(ValueError, match="'up.weight' has no value"):
        OwnMLP().state_dict(auto_initialize=False)


def test_load_state_dict_keeps_the_values(rng: np.random.Generator) -> None:
    model = Stack(2)
    values = values_of(model, rng)
    model.load_state_dict(values)
    found = model.state_dict(auto_initialize=False)
    assert all(found[name] is value for name, value in values.items())
    # a submodule returns its own weights
    part = model.blocks[1].state_dict(auto_initialize=False)
    assert part["up.weight"] is values["blocks.1.up.weight"]


def test_load_state_dict_takes_tensors_and_weight_data(rng: np.random.Generator) -> None:
    model = OwnMLP()
    arrays = values_of(model, rng)
    values: dict[str, Any] = dict(arrays)
    values["up.weight"] = Tensor.from_numpy(arrays["up.weight"])
    values["gate.weight"] = WeightData.from_numpy(arrays["gate.weight"], "gate.weight")
    model.load_state_dict(values)
    got = model.state_dict()
    for name, array in arrays.items():
        np.testing.assert_array_equal(Tensor.from_dlpack(got[name]).to_numpy(), array)


def test_all_mistakes_are_listed_and_nothing_is_set(rng: np.random.Generator) -> None:
    model = OwnMLP()
    values: dict[str, Any] = values_of(model, rng)
    values["gate.weight"] = values["gate.weight"].T.copy()
    values["down.weight"] = values["down.weight"].astype(np.float64)
    values["more"] = np.zeros(1, np.float32)
    del values["up.weight"]
    with pytest.raises(ValueError) as error:
        model.load_state_dict(values)
    text = str(error.value)
    assert text.startswith("OwnMLP: the state dict does not fit")
    assert "gate.weight has shape [10, 5], the model takes [5, 10]" in text
    assert "down.weight is float64, the model takes float32" in text
    assert "missing: up.weight" in text
    assert "not used: more" in text
    with pytest.raises(ValueError, match="no value"):
        model.state_dict(auto_initialize=False)


def test_not_strict_takes_what_there_is(rng: np.random.Generator) -> None:
    model = OwnMLP()
    values = values_of(model, rng)
    del values["up.weight"]
    model.load_state_dict({**values, "more": np.zeros(1, np.float32)}, strict=False)
    found = model.state_dict()
    assert found["gate.weight"] is values["gate.weight"]
    assert not Tensor.from_dlpack(found["up.weight"]).to_numpy().any()


def test_alignment_is_checked() -> None:
    model = nn.Embedding(2, 3, DType.float32, CPU_REF)
    raw = np.zeros(25, np.uint8)
    odd = raw[1:].view(np.float32).reshape(2, 3)
    with pytest.raises(ValueError, match="multiple of 4 bytes.*weight_alignment"):
        model.load_state_dict({"weight": odd})
    model.load_state_dict({"weight": odd}, weight_alignment=1)
    assert model.weight.align == 1


def test_encoding_is_checked_and_can_be_overridden() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            self.weight = Weight("weight", DType.float32, (4, 32), CPU_REF)

        def __call__(self) -> None: ...

    blocks = WeightData.from_numpy(np.zeros((4, 18), np.uint8), "weight")
    blocks.quantization_encoding = QuantizationEncoding.Q4_0
    model = Holder()
    with pytest.raises(ValueError, match="encoded as Q4_0, the model takes plain numbers"):
        model.load_state_dict({"weight": blocks})
    model.load_state_dict({"weight": blocks}, override_quantization_encoding=True)
    weight = model.raw_state_dict()["weight"]
    assert weight.quantization_encoding is QuantizationEncoding.Q4_0
    assert (weight.dtype, list(weight.shape)) == (DType.uint8, [4, 18])
    plain = WeightData.from_numpy(np.zeros((4, 32), np.float16), "weight")
    model.load_state_dict({"weight": plain}, override_quantization_encoding=True)
    assert weight.quantization_encoding is None and weight.dtype is DType.float16
    wide = WeightData.from_numpy(np.zeros((4, 36), np.uint8), "weight")
    wide.quantization_encoding = QuantizationEncoding.Q4_0
    with pytest.raises(ValueError, match=r"has \[.*64.*\] elements, the model takes \[.*32.*\]"):
        model.load_state_dict({"weight": wide}, override_quantization_encoding=True)


def test_shared_weights_have_one_name(rng: np.random.Generator) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            self.first = OwnLinear(3, 3)
            self.second = OwnLinear(3, 3)
            self.second.set_shared_weight("weight", self.first.weight)

        def __call__(self, x: TensorValue) -> TensorValue:
            return self.second(self.first(x))

    model = Tied()
    assert list(model.raw_state_dict()) == ["first.weight"]
    value = rng.standard_normal((3, 3)).astype(np.float32)
    model.load_state_dict({"first.weight": value})
    graph = Graph("tied", model, input_types=[TensorType(DType.float32, [2, 3], CPU_REF)])
    x = rng.standard_normal((2, 3)).astype(np.float32)
    (y,) = run_graph(graph, [x], model.state_dict(), "interpreter")
    assert_close(y, x @ value @ value)


def test_a_module_in_two_places_has_one_name() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            self.first = OwnLinear(3, 3)
            self.again = self.first

        def __call__(self) -> None: ...

    assert list(Twice().raw_state_dict()) == ["first.weight"]


def test_replaced_and_deleted_attributes_are_forgotten() -> None:
    model = OwnMLP()
    model.up = OwnLinear(5, 10)
    model.gate = None  # type: ignore[assignment]
    del model.down
    assert set(model.raw_state_dict()) == {"up.weight"}
    linear = OwnLinear(2, 2)
    linear.weight = Weight("other", DType.float32, (2, 2), CPU_REF)
    assert set(linear.raw_state_dict()) == {"other"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_of_a_module(rng: np.random.Generator, backend: str) -> None:
    model = Stack(2)
    values = values_of(model, rng)
    model.load_state_dict(values)
    graph = Graph("stack", model, input_types=[TensorType(DType.float32, ["n", 5], CPU_REF)])
    x = rng.standard_normal((3, 5)).astype(np.float32)
    (y,) = run_graph(graph, [x], model.state_dict(), backend)
    wanted = mlp(mlp(x, values, "blocks.0."), values, "blocks.1.") * values["scale"]
    assert_close(y, wanted, scale=10)  # nested two MLPs deep


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("named", [False, True])
def test_one_subgraph_serves_all_blocks(
    rng: np.random.Generator, backend: str, named: bool
) -> None:
    model = Stack(3)
    values = values_of(model, rng)
    if named:
        model.load_state_dict(values)
    with Graph("stack", input_types=[TensorType(DType.float32, ["n", 5], CPU_REF)]) as graph:
        x = graph.inputs[0].tensor
        block = model.blocks[0].build_subgraph("block", [x.type], weight_prefix="blocks.0.")
        for index in range(3):
            x = ops.call(block, x, prefix=f"blocks.{index}.")[0].tensor
        graph.output(x)
    assert str(graph).count("mo.matmul") == 3
    # names do not change
    assert model.blocks[0].up.weight.name == ("blocks.0.up.weight" if named else "weight")
    array = rng.standard_normal((4, 5)).astype(np.float32)
    blocks = {k: v for k, v in values.items() if k != "scale"}
    (y,) = run_graph(graph, [array], blocks, backend)
    wanted = array
    for index in range(3):
        wanted = mlp(wanted, values, f"blocks.{index}.")
    assert_close(y, wanted, scale=20)  # nested three MLPs deep


def test_subgraph_with_groups_of_inputs(rng: np.random.Generator) -> None:
    class Sum(nn.Module):
        def __call__(self, first: Any, rest: list[Any]) -> list[TensorValue]:
            return [first.tensor + rest[0].tensor, rest[1].tensor]

    kind = TensorType(DType.float32, [2], CPU_REF)
    with Graph("g", input_types=[kind] * 3) as graph:
        x, *others = graph.inputs
        sub = Sum().build_subgraph("sub", [kind, [kind, kind]])
        of_values = Sum().build_subgraph("of_values", inputs=[x, others])
        first, second = ops.call(sub, *graph.inputs)
        graph.output(*ops.call(of_values, first, x, second), first)
    arrays = [rng.standard_normal(2).astype(np.float32) for _ in range(3)]
    outputs = run_graph(graph, arrays, None, "interpreter")
    np.testing.assert_array_equal(outputs[0], (arrays[0] + arrays[1]) + arrays[0])
    np.testing.assert_array_equal(outputs[1], arrays[2])
    np.testing.assert_array_equal(outputs[2], arrays[0] + arrays[1])


def test_subgraph_mistakes() -> None:
    kind = TensorType(DType.float32, [5], CPU_REF)
    model = Stack(1)
    model.state_dict()

    class Borrows(nn.Module):
        def __call__(self, x: Any) -> TensorValue:
            return x.tensor * model.scale

    with Graph("g", input_types=[kind]):
        with pytest.raises(ValueError, match=r"weight_prefix 'layers\.' is not that"):
            model.blocks[0].build_subgraph("a", [kind], weight_prefix="layers.")
        with pytest.raises(ValueError, match="uses the weight 'scale', which is not its own"):
            Borrows().build_subgraph("b", [kind])


def test_hooks_see_and_replace_outputs() -> None:
    seen: list[tuple[str, int]] = []

    def hook(layer: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        seen.append((type(layer).__name__, len(args)))
        return outputs * 2 if isinstance(layer, OwnMLP) else None

    model = OwnMLP()
    model.state_dict()
    x = np.ones((1, 5), np.float32)
    values = {name: np.ones(v.shape, np.float32) for name, v in model.state_dict().items()}  # type: ignore[attr-defined]
    types = [TensorType(DType.float32, [1, 5], CPU_REF)]
    (plain,) = run_graph(Graph("a", model, input_types=types), [x], values, "interpreter")
    nn.add_layer_hook(hook)
    try:
        (doubled,) = run_graph(Graph("b", model, input_types=types), [x], values, "interpreter")
    finally:
        nn.clear_hooks()
    np.testing.assert_array_equal(doubled, 2 * plain)
    assert seen == [("OwnLinear", 1), ("OwnLinear", 1), ("OwnLinear", 1), ("OwnMLP", 1)]
    Graph("c", model, input_types=types)
    assert len(seen) == 4


def test_a_call_of_the_base_class_is_part_of_the_same_call() -> None:
    class Base(nn.Module):
        def __call__(self, x: int) -> int:
            return x + 1

    class Inherits(Base):
        pass

    class Extends(Base):
        def __call__(self, x: int) -> int:
            return 10 * super().__call__(x)

    seen: list[tuple[str, int]] = []
    nn.add_layer_hook(lambda layer, args, kwargs, y: seen.append((type(layer).__name__, y)))
    try:
        assert [layer(1) for layer in (Base(), Inherits(), Extends())] == [2, 2, 20]
    finally:
        nn.clear_hooks()
    assert seen == [("Base", 2), ("Inherits", 2), ("Extends", 20)]
    assert Extends()(2) == 30 and len(seen) == 3


def test_layer_list_is_a_list() -> None:
    layers = nn.LayerList([OwnLinear(1, 1)])
    layers.append(OwnLinear(2, 2))
    layers.insert(0, OwnLinear(3, 3))
    layers.extend([OwnLinear(4, 4)])
    shapes = [int(layer.weight.shape[0]) for layer in layers]
    assert shapes == [3, 1, 2, 4] and len(layers) == 4
    assert list(layers.raw_state_dict()) == [f"{i}.weight" for i in range(4)]
    del layers[0]
    layers[0] = OwnLinear(5, 5)
    assert [int(layer.weight.shape[0]) for layer in layers] == [5, 2, 4]
    assert layers[1] in layers
    with pytest.raises(TypeError, match="a LayerList is not called"):
        layers()


def test_recursive_named_layers() -> None:
    names = [name for name, _ in nn.recursive_named_layers(Stack(1), "model")]
    assert names == [
        "model",
        "model.blocks",
        "model.blocks.0",
        "model.blocks.0.up",
        "model.blocks.0.gate",
        "model.blocks.0.down",
    ]


def test_text_is_a_tree() -> None:
    assert repr(Stack(3)) == (
        "Stack(\n"
        "  scale: float32[5]\n"
        "  (blocks): LayerList(\n"
        "    (0-2): 3 x OwnMLP(\n"
        "      (up): OwnLinear(\n"
        "        weight: float32[5, 10]\n"
        "      )\n"
        "      (gate): OwnLinear(\n"
        "        weight: float32[5, 10]\n"
        "      )\n"
        "      (down): OwnLinear(\n"
        "        weight: float32[10, 5]\n"
        "      )\n"
        "    )\n"
        "  )\n"
        ")"
    )


def test_abstract_modules_and_layers() -> None:
    with pytest.raises(TypeError, match="abstract"):
        nn.Module()  # type: ignore[abstract]
    with pytest.raises(NotImplementedError, match="Layer does not define __call__"):
        nn.Layer()()


def test_state_dict_fills_symbols() -> None:
    """A weight with symbolic dimensions takes the sizes of its value; a symbol has one size."""

    class Table(nn.Module):
        def __init__(self, *shape: Any) -> None:
            self.weight = Weight("weight", DType.float32, shape, CPU_REF)

        def __call__(self, x: TensorValue) -> TensorValue:
            return x @ self.weight

    table = Table("n", 3)
    value = np.ones((4, 3), np.float32)
    table.load_state_dict({"weight": value})
    assert table.weight.shape == [4, 3]
    graph = Graph("t", table, input_types=[TensorType(DType.float32, (2, 4), CPU_REF)])
    model = InferenceSession([CPU()]).load(graph, weights_registry=table.state_dict())
    np.testing.assert_array_equal(
        model.execute(np.ones((2, 4), np.float32))[0].to_numpy(), np.full((2, 3), 4.0)
    )
    with pytest.raises(ValueError, match=r"weight has shape \[4, 3\], the model takes \[n, n\]"):
        Table("n", "n").load_state_dict({"weight": value})
    with pytest.raises(ValueError, match=r"the model takes \[n, 5\]"):
        Table("n", 5).load_state_dict({"weight": value})


def test_modules_are_copied_without_a_graph() -> None:
    layer = nn.Linear(3, 2, DType.float32, CPU_REF, has_bias=True)
    copied = copy.deepcopy(layer)
    assert copied.weight is not layer.weight and list(copied.raw_state_dict()) == ["weight", "bias"]
    copied.weight.shape = (5, 3)
    assert layer.weight.shape == [2, 3] and copied.weight.dtype is DType.float32


def test_state_dict_and_lists_check_what_they_get() -> None:
    layer = nn.Linear(3, 2, DType.float32, CPU_REF)
    with pytest.raises(ValueError, match=r"weight: .*got list.*NumPy array"):
        layer.load_state_dict({"weight": [[1.0] * 3] * 2})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="is a list, expected a mapping"):
        layer.load_state_dict([("weight", 3)])  # type: ignore[arg-type]
    layer.load_state_dict({"weight": np.ones((2, 3), np.float32)}, weight_alignment=0)
    with pytest.raises(ValueError, match="LayerList: layer 1 is 3"):
        nn.LayerList([layer, 3])  # type: ignore[list-item]


def test_layers_name_what_they_take() -> None:
    with pytest.raises(TypeError, match="the device is 'cpu', expected a DeviceRef"):
        nn.Linear(3, 2, DType.float32, "cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="set_shared_weight: 'w' is 3, expected a Weight"):
        nn.Linear(3, 2, DType.float32, CPU_REF).set_shared_weight("w", 3)  # type: ignore[arg-type]
