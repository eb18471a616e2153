"""Linear layers with adapters of each group of rows, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor
from max.experimental.nn import Linear, LoRA, Module, Sequential, lora_layers, lora_parameters
from max.graph import DeviceRef, TensorType

RANK, COUNT = 2, 3
OPTIONS = {"max_num_loras": COUNT, "max_lora_rank": RANK, "max_lora_seq_len": 8}


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


class Model(Module):
    def __init__(self) -> None:
        self.up = LoRA(Linear(6, 5), **OPTIONS)
        self.plain = Linear(5, 5)
        self.rest = Sequential(LoRA(Linear(5, 4, bias=False), **OPTIONS))

    def forward(
        self, x: Tensor, ids: Tensor, offsets: Tensor, end: Tensor, *stacks: Tensor
    ) -> Tensor:
        for _, layer in lora_layers(self):
            layer.set_lora_batch_info(ids, offsets, end)
        for (_, slot), stack in zip(lora_parameters(self), stacks, strict=True):
            slot.set(stack)
        return self.rest(self.plain(self.up(x)))


def inputs(
    rng: np.random.Generator, rows: int, ids: list[int], offsets: list[int], end: int
) -> list[Any]:
    stacks = [floats(rng, COUNT, *shape) for shape in ((RANK, 6), (5, RANK), (RANK, 5), (4, RANK))]
    return [
        floats(rng, rows, 6), np.array(ids, np.int32), np.array(offsets, np.uint32), np.array([end], np.int64), *stacks,
    ]  # fmt: skip


def expected(model: Model, x: Any, ids: Any, offsets: Any, end: Any, *stacks: Any) -> Any:
    weights = {name: tensor.to_numpy() for name, tensor in model.parameters}
    for index, (path, a, b) in enumerate((("up.", *stacks[:2]), ("rest.0.", *stacks[2:]))):
        y = x @ weights[path + "weight"].T + weights.get(path + "bias", 0)
        for group, adapter in enumerate(ids[: len(offsets) - 1]):
            rows = slice(offsets[group], min(offsets[group + 1], end[0]))
            if adapter >= 0 and rows.start < rows.stop:
                y[rows] += x[rows] @ a[adapter].T @ b[adapter].T
        x = y @ weights["plain.weight"].T + weights["plain.bias"] if not index else y
    return x


CASES = [
    (7, [2, -1, 0], [0, 3, 4, 7], 7),
    (7, [1, 0, 2], [0, 2, 2, 6], 4),
    (1, [1, 1, 1], [0, 1, 1, 1], 1),
    (5, [0, 0, 0], [0, 0, 0, 0], 0),
]


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_groups(rng: np.random.Generator, case: Any) -> None:
    model = Model()
    arrays = inputs(rng, *case)
    want = expected(model, *arrays)
    got = model(*[Tensor.from_dlpack(np.copy(array)) for array in arrays])
    np.testing.assert_allclose(got.to_numpy(), want, rtol=1e-4, atol=1e-4)


def test_a_compiled_model(rng: np.random.Generator) -> None:
    model = Model()
    cpu = DeviceRef.CPU()
    slots = [slot.type for _, slot in lora_parameters(model)]
    compiled = model.compile(
        TensorType(DType.float32, ("n", 6), cpu), TensorType(DType.int32, (3,), cpu),
        TensorType(DType.uint32, (4,), cpu), TensorType(DType.int64, (1,), cpu), *slots,
    )  # fmt: skip
    for case in CASES:
        arrays = inputs(rng, *case)
        got = compiled(*arrays)
        np.testing.assert_allclose(got.to_numpy(), expected(model, *arrays), rtol=1e-4, atol=1e-4)


def test_names() -> None:
    model = Model()
    assert [name for name, _ in model.parameters] == [
        "up.weight", "up.bias", "plain.weight", "plain.bias", "rest.0.weight",
    ]  # fmt: skip
    assert [name for name, _ in lora_layers(model)] == ["up", "rest.0"]
    assert [name for name, _ in lora_parameters(model)] == [
        "up.lora_a", "up.lora_b", "rest.0.lora_a", "rest.0.lora_b",
    ]  # fmt: skip
    a, b = model.up.lora_a.type, model.up.lora_b.type
    assert a.shape == (COUNT, RANK, 6) and b.shape == (COUNT, 5, RANK)
    assert repr(model.up) == "LoRA(module=Linear(in_dim=Dim(6), out_dim=Dim(5)))"
    assert list(model.up.local_parameters) == [] and model.up.device == CPU()


def test_what_is_missing_or_does_not_fit(rng: np.random.Generator) -> None:
    with pytest.raises(TypeError, match="a Sequential, expected a Linear"):
        LoRA(Sequential(), **OPTIONS)
    for name in OPTIONS:
        with pytest.raises(ValueError, match=f"{name} is 0"):
            LoRA(Linear(6, 4), **{**OPTIONS, name: 0})
    layer = LoRA(Linear(6, 4), **OPTIONS)
    x = Tensor.ones((3, 6))
    with pytest.raises(RuntimeError, match="set_lora_batch_info"):
        layer(x)
    ids, offsets = Tensor([0], dtype=DType.int32), Tensor([0, 3], dtype=DType.uint32)
    layer.set_lora_batch_info(ids, offsets, Tensor([3], dtype=DType.int64))
    with pytest.raises(RuntimeError, match="lora_a is not set"):
        layer(x)
    for value, error in (
        (Tensor.zeros((COUNT, RANK, 5)), ValueError),
        (Tensor.zeros((COUNT, RANK, 6), dtype=DType.float64), TypeError),
        (floats(rng, COUNT, RANK, 6), TypeError),
    ):
        with pytest.raises(error, match="lora_a is"):
            layer.lora_a.set(value)
    layer.lora_a.set(Tensor.zeros((COUNT, RANK, 6)))
    layer.lora_b.set(Tensor.zeros((COUNT, 4, RANK)))
    np.testing.assert_array_equal(layer(x).to_numpy(), layer.module(x).to_numpy())
    with pytest.raises(ValueError, match="the input is"):
        layer(Tensor.ones((1, 3, 6)))
    layer.set_lora_batch_info(ids, offsets, Tensor([3.0]))
    with pytest.raises(TypeError, match="lora_end_idx"):
        layer(x)
    layer.set_lora_batch_info(
        Tensor([COUNT], dtype=DType.int32), offsets, Tensor([3], dtype=DType.int64)
    )
    with pytest.raises(Exception, match="grouped"):
        layer(x).to_numpy()
