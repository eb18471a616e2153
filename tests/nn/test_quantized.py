"""Layers with quantized weights."""

from __future__ import annotations

import numpy as np
import pytest

from max import nn
from max.dtype import DType
from max.dtype.blocks import decode
from max.graph import DeviceRef, Graph, ShardingStrategy, TensorType
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.graph.weights import WeightData
from tests.nn.harness import BACKENDS, CPU_REF, evaluate, run_graph
from tests.quantized import ENCODINGS, assert_product, gptq_weight, random_weight
from tests.tolerance import assert_close


def blocks(array: np.ndarray, encoding: str) -> WeightData:
    data = WeightData.from_numpy(array, "weight")
    data.quantization_encoding = QuantizationEncoding(encoding)
    return data


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_linear(encoding, backend, rng):
    w, b = random_weight(rng, 12, 512, encoding), rng.standard_normal(12).astype(np.float32)
    layer = nn.Linear(
        512,
        12,
        DType.uint8,
        CPU_REF,
        has_bias=True,
        quantization_encoding=QuantizationEncoding(encoding),
    )
    assert layer.weight.dtype is DType.uint8 and layer.bias.dtype is DType.float32
    assert list(layer.weight.original_dtype_and_shape[1]) == [12, 512]
    x = rng.standard_normal((3, 512)).astype(np.float32)
    (y,) = evaluate(layer, [x], backend, {"weight": blocks(w, encoding), "bias": b})
    assert_product(y - b, x, decode(w, encoding), scale=8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [DType.uint8, DType.float32, DType.bfloat16])
def test_embedding(dtype, backend, rng):
    table = random_weight(rng, 20, 256, "Q6_K")
    layer = nn.Embedding(20, 256, dtype, CPU_REF, QuantizationEncoding.Q6_K)
    indices = np.array([[3, 0], [19, 3]])
    (y,) = evaluate(layer, [indices], backend, {"weight": blocks(table, "Q6_K")})
    expected = decode(table, "Q6_K")[indices]
    if dtype is DType.bfloat16:
        expected = expected.astype(y.dtype)
    np.testing.assert_array_equal(y, expected)


def test_a_shared_weight(rng):
    """The embedding table as the output layer's weight, as in tied models."""
    table = random_weight(rng, 20, 64, "Q8_0")

    class Tied(nn.Module):
        def __init__(self) -> None:
            self.embed = nn.Embedding(20, 64, DType.float32, CPU_REF)
            self.head = nn.Linear(64, 20, DType.float32, CPU_REF)
            self.head.set_shared_weight("weight", self.embed.weight)

        def __call__(self, indices):
            return self.head(self.embed(indices))

    model = Tied()
    model.load_state_dict(
        {"embed.weight": blocks(table, "Q8_0")}, override_quantization_encoding=True
    )
    indices = np.array([3, 7])
    with Graph("g", input_types=[TensorType(DType.int64, [2], CPU_REF)]) as graph:
        graph.output(model(graph.inputs[0].tensor))
    (y,) = run_graph(graph, [indices], model.state_dict(), "engine")
    plain = decode(table, "Q8_0")
    assert_product(y, plain[indices], plain)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq_linear(desc_act, backend, rng):
    tensors, weight = gptq_weight(rng, 64, 32, 4, 16, desc_act)
    bias = rng.standard_normal(32).astype(np.float16)
    layer = nn.GPTQLinear(
        64,
        32,
        DType.float16,
        CPU_REF,
        has_bias=True,
        quantization_encoding=QuantizationEncoding.GPTQ,
        quantization_config=QuantizationConfig("gptq", 4, 16, desc_act),
    )
    names = ("qweight", "qzeros", "scales", "g_idx")
    values = {**dict(zip(names, tensors, strict=False)), "bias": bias}
    assert layer.raw_state_dict().keys() == values.keys()
    x = rng.standard_normal((5, 64)).astype(np.float32)
    (y,) = evaluate(layer, [x], backend, values)
    assert_product(y - bias.astype(np.float32), x, weight, scale=8)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_K"])
@pytest.mark.parametrize("strategy", ["rowwise", "columnwise"])
def test_shards(encoding, strategy, rng):
    w = random_weight(rng, 8, 512, encoding)
    layer = nn.Linear(
        512, 8, DType.float32, CPU_REF, quantization_encoding=QuantizationEncoding(encoding)
    )
    layer.load_state_dict({"weight": blocks(w, encoding)})
    layer.sharding_strategy = getattr(ShardingStrategy, strategy)(2)
    first, second = layer.shard([DeviceRef.CPU(0), DeviceRef.CPU(0)])
    with Graph("g", input_types=[TensorType(DType.float32, [3, 512], CPU_REF)]) as graph:
        x = graph.inputs[0].tensor
        if strategy == "rowwise":
            graph.output(first(x), second(x))
        else:
            graph.output(first(x[:, :256]) + second(x[:, 256:]))
    x = rng.standard_normal((3, 512)).astype(np.float32)
    outputs = run_graph(graph, [x], layer.state_dict(), "engine")
    plain = decode(w, encoding)
    if strategy == "rowwise":
        assert_product(np.concatenate(outputs, 1), x, plain)
    else:
        np.testing.assert_allclose(outputs[0], x @ plain.T, atol=0.02 * np.abs(x @ plain.T).max())


def test_v1(rng):
    w = random_weight(rng, 4, 64, "Q4_0")
    types = [TensorType(DType.float32, [2, 64], CPU_REF), TensorType(DType.uint8, w.shape, CPU_REF)]
    with Graph("g", input_types=types) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(nn.QLinearV1(weight, None, QuantizationEncoding.Q4_0)(x))
    x = rng.standard_normal((2, 64)).astype(np.float32)
    assert_close(run_graph(graph, [x, w], None, "interpreter")[0], x @ decode(w, "Q4_0").T, scale=4)


def test_mistakes():
    gptq = QuantizationConfig("gptq", 4, 32)
    with pytest.raises(ValueError, match="Linear: a GPTQ weight comes in parts; use GPTQLinear"):
        nn.Linear(64, 8, DType.uint8, CPU_REF, quantization_encoding=QuantizationEncoding.GPTQ)
    with pytest.raises(ValueError, match="q4_k encodes 256 elements at a time"):
        nn.Linear(64, 8, DType.uint8, CPU_REF, quantization_encoding=QuantizationEncoding.Q4_K)
    with pytest.raises(ValueError, match="a Q4_0 weight is not clamped"):
        nn.Linear(
            64,
            8,
            DType.uint8,
            CPU_REF,
            quantization_encoding=QuantizationEncoding.Q4_0,
            clip_weight=1,
        )
    with pytest.raises(ValueError, match="Embedding: a table cannot be encoded as GPTQ"):
        nn.Embedding(8, 64, DType.uint8, CPU_REF, QuantizationEncoding.GPTQ)
    with pytest.raises(ValueError, match="the config is None, expected quant_method gptq"):
        nn.GPTQLinear(64, 8, DType.float16, CPU_REF)
    with pytest.raises(ValueError, match="64 inputs and 9 outputs, expected multiples of 8"):
        nn.GPTQLinear(64, 9, DType.float16, CPU_REF, quantization_config=gptq)
    with pytest.raises(ValueError, match="the encoding is Q4_0, expected GPTQ"):
        nn.GPTQLinear(
            64,
            8,
            DType.float16,
            CPU_REF,
            False,
            QuantizationEncoding.Q4_0,
            quantization_config=gptq,
        )
    with pytest.raises(ValueError, match="not split over devices"):
        nn.GPTQLinear(
            64, 8, DType.float16, CPU_REF, quantization_config=gptq
        ).sharding_strategy = ShardingStrategy.rowwise(2)
