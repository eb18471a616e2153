"""Linear, MLP, embedding and norm layers against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from max import nn
from max.dtype import DType
from max.graph import Graph, TensorType, ops
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import load_weights
from max.nn.clamp import clamp
from tests.nn.harness import BACKENDS, BF16, CPU_REF, FLOATS, evaluate, f32, normal, run_graph
from tests.tolerance import assert_close

both = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(f32(array))


@both
@dtypes
@pytest.mark.parametrize("shape", [(1, 7), (5, 33), (2, 3, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(
    rng: np.random.Generator, backend: str, dtype: str, shape: tuple[int, ...], bias: bool
) -> None:
    layer = nn.Linear(shape[-1], 19, FLOATS[dtype], CPU_REF, has_bias=bias)
    weights = {"weight": normal(rng, (19, shape[-1]), dtype)}
    if bias:
        weights["bias"] = normal(rng, (19,), dtype)
    x = normal(rng, shape, dtype)
    (y,) = evaluate(layer, [x], backend, weights)
    wanted = torch.nn.functional.linear(*map(tensor, (x, *weights.values())))
    assert y.dtype == x.dtype
    assert_close(y, wanted, scale=2)


@both
def test_linear_of_float32_and_half_weights(rng: np.random.Generator, backend: str) -> None:
    layer = nn.Linear(40, 9, DType.bfloat16, CPU_REF)
    weight, x = normal(rng, (9, 40), "bfloat16"), normal(rng, (3, 40))
    (y,) = evaluate(layer, [x], backend, {"weight": weight})
    assert y.dtype == np.float32
    assert_close(y, tensor(x.astype(weight.dtype)) @ tensor(weight).T, weight.dtype)


@both
def test_linear_names_and_clipping(rng: np.random.Generator, backend: str) -> None:
    layer = nn.Linear(6, 4, DType.float32, CPU_REF, name="out", has_bias=True, clip_weight=0.5)
    assert list(layer.raw_state_dict()) == ["out.weight", "out.bias"]
    weights = {"out.weight": normal(rng, (4, 6)), "out.bias": normal(rng, (4,))}
    x = normal(rng, (2, 6))
    (y,) = evaluate(layer, [x], backend, weights)
    assert_close(y, x @ weights["out.weight"].clip(-0.5, 0.5).T + weights["out.bias"])


def test_linear_mistakes() -> None:
    layer = nn.Linear(6, 4, DType.float32, CPU_REF)
    with (
        Graph("g", input_types=[TensorType(DType.float32, [2, 5], CPU_REF)]) as graph,
        pytest.raises(ValueError, match=r"Linear: the input is .*\[2, 5\].*\[4, 6\]"),
    ):
        layer(graph.inputs[0].tensor)


ACTIVATIONS: dict[str, Any] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@both
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mlp(rng: np.random.Generator, backend: str, name: str) -> None:
    check_mlp(rng, backend, name, "float32", bias=name == "relu")


@both
def test_mlp_bfloat16(rng: np.random.Generator, backend: str) -> None:
    check_mlp(rng, backend, "silu", "bfloat16", bias=True)


def check_mlp(rng: np.random.Generator, backend: str, name: str, dtype: str, bias: bool) -> None:
    layer = nn.MLP(FLOATS[dtype], None, 24, 40, [CPU_REF], has_bias=bias, activation_function=name)
    weights = {
        key: (f32(normal(rng, [int(d) for d in w.shape])) * 0.2).astype(FLOATS[dtype].to_numpy())
        for key, w in layer.raw_state_dict().items()
    }
    x = normal(rng, (5, 24), dtype)

    def linear(part: str, v: torch.Tensor) -> torch.Tensor:
        b = weights.get(f"{part}_proj.bias")
        w = tensor(weights[f"{part}_proj.weight"])
        return torch.nn.functional.linear(v, w, None if b is None else tensor(b))

    hidden = ACTIVATIONS[name](linear("gate", tensor(x))) * linear("up", tensor(x))
    (y,) = evaluate(layer, [x], backend, weights)
    assert y.dtype == x.dtype
    assert_close(y, linear("down", hidden), scale=2)


def test_mlp_mistakes() -> None:
    with pytest.raises(ValueError, match="the activation is 'swish'"):
        nn.MLP(DType.float32, None, 4, 4, [CPU_REF], activation_function="swish")
    with pytest.raises(ValueError, match="no device"):
        nn.MLP(DType.float32, None, 4, 4, [])


@both
@dtypes
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3)])
def test_embedding(
    rng: np.random.Generator, backend: str, dtype: str, shape: tuple[int, ...]
) -> None:
    layer = nn.Embedding(11, 5, FLOATS[dtype], CPU_REF, name="table")
    table = normal(rng, (11, 5), dtype)
    indices = rng.integers(0, 11, shape)
    (y,) = evaluate(layer, [indices], backend, {"table": table})
    np.testing.assert_array_equal(y, table[indices])


@both
@dtypes
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("before", [False, True])
def test_rms_norm(
    rng: np.random.Generator, backend: str, dtype: str, offset: float, before: bool
) -> None:
    layer = nn.RMSNorm(
        37, FLOATS[dtype], eps=1e-3, weight_offset=offset, multiply_before_cast=before
    )
    x, weight = normal(rng, (2, 4, 37), dtype), normal(rng, (37,), dtype)
    (y,) = evaluate(layer, [x], backend, {"weight": weight})
    wide = tensor(x)
    wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3)
    assert_close(y, wanted * (tensor(weight) + offset))


@both
def test_rms_norm_of_float32_with_half_weights(rng: np.random.Generator, backend: str) -> None:
    x, weight = normal(rng, (3, 16)), normal(rng, (16,), "bfloat16")
    (y,) = evaluate(nn.RMSNorm(16, DType.bfloat16), [x], backend, {"weight": weight})
    assert y.dtype == np.float32
    assert_close(y, torch.nn.functional.rms_norm(tensor(x), (16,), tensor(weight), 1e-6))


@both
@pytest.mark.parametrize("size", [1, 17, 33, 34, 40, 48, 49, 63, 80])
def test_norm_rounded_to_half(rng: np.random.Generator, backend: str, size: int) -> None:
    """A norm before a product. LLVM once aborted on rows that end in half a vector."""
    x, weight = normal(rng, (3, size)), normal(rng, (size,))
    norm = nn.RMSNorm(size, DType.float32)
    norm.load_state_dict({"weight": weight})
    types = [TensorType(DType.float32, ["n", size], CPU_REF)]
    graph = Graph("g", lambda v: ops.cast(norm(v.tensor), DType.bfloat16), input_types=types)
    (y,) = run_graph(graph, [x], norm.state_dict(), backend)
    wanted = torch.nn.functional.rms_norm(tensor(x), (size,), tensor(weight), 1e-6)
    assert_close(y, wanted, BF16)


@both
@dtypes
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(rng: np.random.Generator, backend: str, dtype: str, bias: bool) -> None:
    layer = nn.LayerNorm(21, [CPU_REF], FLOATS[dtype], use_bias=bias)
    weights = {"weight": normal(rng, (21,), dtype)}
    if bias:
        weights["bias"] = normal(rng, (21,), dtype)
    x = normal(rng, (3, 21), dtype)
    (y,) = evaluate(layer, [x], backend, weights)
    assert_close(
        y, torch.nn.functional.layer_norm(tensor(x), (21,), *map(tensor, weights.values()))
    )


@both
def test_constant_layer_norm(rng: np.random.Generator, backend: str) -> None:
    x = normal(rng, (3, 8))
    (y,) = evaluate(nn.ConstantLayerNorm(8, CPU_REF, DType.float32), [x], backend)
    assert_close(y, torch.nn.functional.layer_norm(tensor(x), (8,)))


@both
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (1, 6, 3, 4)])
def test_group_norm(
    rng: np.random.Generator, backend: str, affine: bool, shape: tuple[int, ...]
) -> None:
    layer = nn.GroupNorm(3, 6, affine=affine, device=CPU_REF)
    weights = {"weight": normal(rng, (6,)), "bias": normal(rng, (6,))} if affine else {}
    x = normal(rng, shape)
    (y,) = evaluate(layer, [x], backend, weights)
    wanted = torch.nn.functional.group_norm(tensor(x), 3, *map(tensor, weights.values()))
    assert_close(y, wanted, scale=2)


def test_group_norm_mistakes() -> None:
    with pytest.raises(ValueError, match="7 channels cannot be divided into 3 groups"):
        nn.GroupNorm(3, 7, device=CPU_REF)


@both
def test_sequential_and_layers_of_values(rng: np.random.Generator, backend: str) -> None:
    w, b, g = normal(rng, (6, 4)), normal(rng, (6,)), normal(rng, (6,))
    table = normal(rng, (5, 4))

    def model(indices: Any) -> Any:
        layers = nn.Sequential(
            [
                nn.EmbeddingV1(ops.constant(table), CPU_REF),
                nn.LinearV1(ops.constant(w), ops.constant(b)),
                nn.RMSNormV1(ops.constant(g)),
                nn.LayerNormV1(ops.constant(g), ops.constant(b)),
            ]
        )
        return layers(indices)

    indices = rng.integers(0, 5, 3)
    (y,) = evaluate(model, [indices], backend)
    h = torch.nn.functional.linear(tensor(table[indices]), tensor(w), tensor(b))
    h = torch.nn.functional.rms_norm(h, (6,), tensor(g), 1e-6)
    assert_close(y, torch.nn.functional.layer_norm(h, (6,), tensor(g), tensor(b), 1e-6), scale=2)


@both
def test_mlp_v1(rng: np.random.Generator, backend: str) -> None:
    arrays = [normal(rng, shape) for shape in ((3, 6), (6, 4), (6, 4), (4,))]
    down, up, gate, _ = arrays
    x = normal(rng, (2, 4))

    def model(x: Any) -> Any:
        gated, back, other = (nn.LinearV1(ops.constant(w)) for w in (gate, down, up))
        return nn.MLPV1(gated, back, other)(x)

    (y,) = evaluate(model, [x], backend)
    hidden = torch.nn.functional.silu(tensor(x @ gate.T)) * tensor(x @ up.T)
    assert_close(y, hidden @ tensor(down).T)


@both
def test_clamp(rng: np.random.Generator, backend: str) -> None:
    x = normal(rng, (5, 5))
    for low, high in ((-0.5, 0.5), (None, 0.1), (0.2, None), (None, None)):
        (y,) = evaluate(lambda v, low=low, high=high: clamp(v, low, high), [x], backend)
        wanted = x if low is None else np.maximum(x, np.float32(low))
        np.testing.assert_array_equal(
            y, wanted if high is None else np.minimum(wanted, np.float32(high))
        )


@both
@dtypes
@pytest.mark.parametrize(("stacked", "bias"), [(False, False), (False, True), (True, True)])
def test_multihead_attention(
    rng: np.random.Generator, backend: str, dtype: str, stacked: bool, bias: bool
) -> None:
    layer = nn.MultiheadAttention(
        3, 24, dtype=FLOATS[dtype], qkv_has_bias=bias, o_proj_has_bias=bias, stacked_qkv=stacked
    )
    weights = {
        name: (f32(normal(rng, [int(d) for d in w.shape])) * 0.4).astype(FLOATS[dtype].to_numpy())
        for name, w in layer.raw_state_dict().items()
    }
    x = normal(rng, (2, 5, 24), dtype)
    (y,) = evaluate(layer, [x], backend, weights, dims=[("batch", "length", 24)])
    if stacked:
        wide, offset = tensor(weights["qkv_proj.weight"]), tensor(weights["qkv_proj.bias"])
    else:
        parts = [f"{p}_proj" for p in "qkv"]
        wide = torch.cat([tensor(weights[f"{p}.weight"]) for p in parts])
        offset = torch.cat([tensor(weights[f"{p}.bias"]) for p in parts]) if bias else None
    wanted, _ = torch.nn.functional.multi_head_attention_forward(
        *[tensor(x).transpose(0, 1)] * 3,
        embed_dim_to_check=24,
        num_heads=3,
        in_proj_weight=wide,
        in_proj_bias=offset,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=tensor(weights["o_proj.weight"]),
        out_proj_bias=tensor(weights["o_proj.bias"]) if bias else None,
        training=False,
        need_weights=False,
    )
    assert y.dtype == x.dtype
    assert_close(y, wanted.transpose(0, 1), scale=2)


def test_multihead_attention_mistakes() -> None:
    with pytest.raises(ValueError, match="24 cannot be divided into 5 heads"):
        nn.MultiheadAttention(5, 24)
    with pytest.raises(NotImplementedError, match="2 devices need collectives"):
        nn.MultiheadAttention(4, 24, [CPU_REF, CPU_REF])


def test_linear_of_a_checkpoint(rng: np.random.Generator, tmp_path: Path) -> None:
    w, b = normal(rng, (3, 4)), normal(rng, (3,))
    save_file({"out.weight": w, "out.bias": b}, tmp_path / "model.safetensors")
    weights = load_weights([tmp_path / "model.safetensors"])
    x = normal(rng, (2, 4))
    with Graph("g", input_types=[TensorType(DType.float32, [2, 4], CPU_REF)]) as graph:
        layer = nn.LinearV1.create(DType.float32, None, 4, 3, weights.out.weight, weights.out.bias)
        graph.output(layer(graph.inputs[0].tensor))
    (y,) = run_graph(graph, [x], weights.allocated_weights, "interpreter")
    assert_close(y, x @ w.T + b)
    with pytest.raises(ValueError, match="expected encoding Q4_0, the file has none"):
        nn.LinearV1.create(DType.uint8, QuantizationEncoding.Q4_0, 32, 3, weights.out.weight)
