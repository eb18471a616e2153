"""Linear layers with scaled float8 weights, against NumPy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, ShardingStrategy, TensorType, ops
from max.nn import MLP, Linear, kernels
from max.nn.float8_config import (
    Float8Config,
    Float8InputScaleSpec,
    Float8ScaleGranularity,
    Float8ScaleOrigin,
    Float8WeightScaleSpec,
)

TENSOR, ROW, COLUMN, BLOCK = (
    Float8ScaleGranularity.TENSOR,
    Float8ScaleGranularity.ROWWISE,
    Float8ScaleGranularity.COLWISE,
    Float8ScaleGranularity.BLOCK,
)
CPU_REF = DeviceRef.CPU()
SESSION = InferenceSession(devices=[CPU()])
BF16 = ml_dtypes.bfloat16
Array = np.ndarray[Any, np.dtype[Any]]


def config(
    of_input: Float8ScaleGranularity,
    of_weight: Float8ScaleGranularity,
    static: bool = False,
    group: int = 16,
    blocks: tuple[int, int] = (8, 16),
    dtype: DType = DType.float32,
    **more: Any,
) -> Float8Config:
    origin = Float8ScaleOrigin.STATIC if static else Float8ScaleOrigin.DYNAMIC
    return Float8Config(
        Float8InputScaleSpec(
            of_input, origin, dtype, block_size=(1, group) if of_input is BLOCK else None, **more
        ),
        Float8WeightScaleSpec(of_weight, dtype, blocks if of_weight is BLOCK else None),
        set(),
        set(),
    )


def blown_up(scales: Array, shape: tuple[int, int], blocks: tuple[int, int]) -> Array:
    """Returns the scale of each element of a weight."""
    scales = np.asarray(scales, np.float64)
    if scales.ndim == 2:
        for axis in range(2):
            if scales.shape[axis] not in (1, shape[axis]):
                scales = np.repeat(scales, blocks[axis], axis)
        scales = scales[: shape[0], : shape[1]]
    return np.broadcast_to(scales, shape)


def reference(
    x: Array, w: Array, weight_scale: Array, cfg: Float8Config, input_scale: float | None
) -> Array:
    """Returns the product of the rounded factors in float64."""
    greatest = float(ml_dtypes.finfo(w.dtype).max)
    wide = x.astype(np.float32)
    spec = cfg.input_scale
    if input_scale is not None:
        scales = np.full((1, 1), np.float32(input_scale))
    elif spec.is_tensor:
        scales = np.full((1, 1), np.abs(wide).max() / np.float32(greatest), np.float32)
    else:
        group = spec.block_size[1] if spec.block_size else x.shape[-1]
        most = np.abs(wide.reshape(len(x), -1, group)).max(-1)
        most = np.minimum(most, np.float32(spec.activation_scale_ub or np.inf))
        scales = np.repeat(np.maximum(most, np.float32(1e-12)) / np.float32(greatest), group, 1)
    scales = scales.astype(spec.dtype.to_numpy()).astype(np.float32)
    low = np.clip(wide / scales, -greatest, greatest).astype(w.dtype)
    left = low.astype(np.float64) * scales
    blocks = cfg.weight_scale.block_size or (1, 1)
    return left @ (w.astype(np.float64) * blown_up(weight_scale, w.shape, blocks)).T


CASES = {
    "static": (config(TENSOR, TENSOR, static=True), 40, 24),
    "static, rows": (config(TENSOR, ROW, static=True), 40, 24),
    "static, blocks": (config(TENSOR, BLOCK, static=True), 48, 24),
    "dynamic, rows": (config(COLUMN, ROW), 40, 24),
    "dynamic, rows, bf16 scales": (config(COLUMN, ROW, dtype=DType.bfloat16), 64, 33),
    "dynamic, tensor": (config(COLUMN, TENSOR), 40, 24),
    "dynamic, columns": (config(COLUMN, COLUMN), 40, 24),
    "one scale": (config(TENSOR, TENSOR), 40, 24),
    "bounded": (config(COLUMN, ROW, activation_scale_ub=1.5), 40, 24),
    "blocks": (config(BLOCK, BLOCK), 64, 32),
    "blocks that do not divide": (config(BLOCK, BLOCK, group=20), 40, 27),
    "groups and rows": (config(BLOCK, ROW), 64, 24),
    "rows and blocks": (config(COLUMN, BLOCK), 64, 24),
}


@pytest.mark.parametrize("element", [DType.float8_e4m3fn, DType.float8_e5m2], ids=lambda d: d.name)
@pytest.mark.parametrize("name", CASES)
def test_linear(name: str, element: DType, rng: np.random.Generator) -> None:
    cfg, columns, rows = CASES[name]
    layer = Linear(columns, rows, element, CPU_REF, has_bias=True, float8_config=cfg)
    assert layer.weight_scale is not None and layer.bias is not None
    w = (rng.standard_normal((rows, columns)) * 20).astype(element.to_numpy())
    shape = [int(dim) for dim in layer.weight_scale.shape]
    scale = rng.uniform(0.01, 0.2, shape).astype(cfg.weight_scale.dtype.to_numpy())
    bias = rng.standard_normal(rows).astype(element.to_numpy())
    state = {"weight": w, "weight_scale": scale, "bias": bias}
    input_scale = 0.01 if cfg.is_static else None
    if input_scale is not None:
        state["input_scale"] = np.array(input_scale, np.float32)
    layer.load_state_dict(state)
    # rows of zeros, values out of range, and a batch axis
    x = (rng.standard_normal((2, 5, columns)) * 2).astype(BF16)
    x[0, 1] = 0
    x[1, 3, 0] = 500
    with Graph("f8", input_types=[TensorType(DType.bfloat16, (2, "n", columns), CPU_REF)]) as graph:
        graph.output(layer(graph.inputs[0].tensor))
    (y,) = SESSION.load(graph, weights_registry=layer.state_dict()).execute(x)
    result = y.to_numpy()
    assert result.dtype == BF16 and result.shape == (2, 5, rows)
    product = reference(x.reshape(10, columns), w, scale, cfg, input_scale)
    expected = product.astype(np.float32).astype(BF16).astype(np.float64) + bias.astype(np.float64)
    # roundings to bfloat16: of the sums, of the product, and after the bias
    sums = np.abs(product)
    bound = 2.0**-8 * (2 * sums + np.abs(expected)) + 1e-5
    error = np.abs(result.reshape(10, rows).astype(np.float64) - expected)
    assert (error <= bound).all(), (error / bound).max()


def test_quantized_elements_and_scales(rng: np.random.Generator) -> None:
    x = rng.standard_normal((7, 32)).astype(np.float32)
    x[2] = 0
    cfg = config(BLOCK, BLOCK, group=8)
    with Graph("q", input_types=[TensorType(DType.float32, ("m", 32), CPU_REF)]) as graph:
        value = graph.inputs[0].tensor
        elements, scales = kernels.quantize_dynamic_scaled_float8(
            value, cfg.input_scale, cfg.weight_scale, group_size_or_per_token=8,
            scales_type=DType.float32,
        )  # fmt: skip
        scale = ops.constant(0.25, DType.float32, CPU_REF)
        graph.output(
            elements,
            scales,
            kernels.quantize_static_scaled_float8(value, scale),
            kernels.quantize_static_scaled_float8(value, scale, scale_is_inverted=False),
        )
    elements, scales, divided, multiplied = (o.to_numpy() for o in SESSION.load(graph).execute(x))
    assert scales.shape == (4, 7)
    e4 = ml_dtypes.float8_e4m3fn
    expected = np.maximum(np.abs(x.reshape(7, 4, 8)).max(-1), np.float32(1e-12)) / np.float32(448)
    np.testing.assert_allclose(scales.T, expected, rtol=1e-6)
    ratio = x / np.repeat(scales.T, 8, 1)
    np.testing.assert_array_equal(elements.view(np.uint8), ratio.astype(e4).view(np.uint8))
    # each group contains the largest finite number
    assert (np.abs(elements[x.any(1)].astype(np.float32)).reshape(-1, 8).max(-1) == 448).all()
    np.testing.assert_array_equal(divided.view(np.uint8), (x / 0.25).astype(e4).view(np.uint8))
    np.testing.assert_array_equal(multiplied.view(np.uint8), (x * 0.25).astype(e4).view(np.uint8))


def test_batched(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4, 32)).astype(BF16)
    b = rng.standard_normal((3, 8, 32)).astype(ml_dtypes.float8_e4m3fn)
    b_scales = rng.uniform(0.5, 2, (3, 1, 2)).astype(np.float32)
    cfg = config(BLOCK, BLOCK)
    with Graph("b", input_types=[TensorType(DType.bfloat16, a.shape, CPU_REF)]) as graph:
        elements, scales = kernels.batched_quantize_dynamic_scaled_float8(
            graph.inputs[0].tensor, cfg.input_scale, cfg.weight_scale,
            group_size_or_per_token=16, scales_type=DType.float32,
        )  # fmt: skip
        weight, weight_scales = kernels.convert_weights_to_fp8_fnuz_if_needed(
            ops.constant(b, DType.float8_e4m3fn, CPU_REF),
            ops.constant(b_scales, DType.float32, CPU_REF),
        )
        graph.output(
            kernels.batched_dynamic_scaled_fp8_matmul(
                elements, weight, scales, weight_scales, cfg.input_scale, cfg.weight_scale,
                out_type=DType.float32,
            )
        )  # fmt: skip
    (y,) = SESSION.load(graph).execute(a)
    for i in range(3):
        expected = reference(a[i], b[i], b_scales[i], cfg, None)
        np.testing.assert_allclose(y.to_numpy()[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", [ROW, BLOCK, COLUMN, TENSOR], ids=str)
def test_shards(kind: Float8ScaleGranularity, axis: int, rng: np.random.Generator) -> None:
    cfg = config(COLUMN if kind is not BLOCK else BLOCK, kind)
    layer = Linear(64, 32, DType.float8_e4m3fn, CPU_REF, float8_config=cfg)
    assert layer.weight_scale is not None
    w = rng.standard_normal((32, 64)).astype(ml_dtypes.float8_e4m3fn)
    shape = [int(dim) for dim in layer.weight_scale.shape]
    scale = rng.uniform(0.5, 2, shape).astype(np.float32)
    layer.load_state_dict({"weight": w, "weight_scale": scale})
    layer.sharding_strategy = (
        ShardingStrategy.columnwise(2) if axis else ShardingStrategy.rowwise(2)
    )
    parts = layer.shard([CPU_REF, CPU_REF])
    x = rng.standard_normal((5, 64)).astype(BF16)
    with Graph("s", input_types=[TensorType(DType.bfloat16, (5, 64), CPU_REF)]) as graph:
        value = graph.inputs[0].tensor
        graph.output(
            *(p(value[:, 32 * i : 32 * i + 32] if axis else value) for i, p in enumerate(parts))
        )
    outputs = [
        o.to_numpy() for o in SESSION.load(graph, weights_registry=layer.state_dict()).execute(x)
    ]
    blocks = cfg.weight_scale.block_size or (1, 1)
    whole = blown_up(scale, w.shape, blocks)
    for i, output in enumerate(outputs):
        rows = slice(None) if axis else slice(16 * i, 16 * i + 16)
        columns = slice(32 * i, 32 * i + 32) if axis else slice(None)
        expected = reference(
            x[:, columns], w[rows, columns], whole[rows, columns].astype(np.float32), cfg, None
        )
        np.testing.assert_allclose(output.astype(np.float64), expected, rtol=2.0**-7, atol=1e-4)


def test_mlp(rng: np.random.Generator) -> None:
    cfg = config(COLUMN, ROW)
    mlp = MLP(DType.float8_e4m3fn, None, 32, 48, [CPU_REF], float8_config=cfg)
    state: dict[str, Array] = {}
    for name, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48))):
        state[f"{name}_proj.weight"] = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        state[f"{name}_proj.weight_scale"] = rng.uniform(0.1, 0.2, (shape[0], 1)).astype(np.float32)
    mlp.load_state_dict(state)
    x = rng.standard_normal((4, 32)).astype(BF16)
    with Graph("mlp", input_types=[TensorType(DType.bfloat16, (4, 32), CPU_REF)]) as graph:
        graph.output(mlp(graph.inputs[0].tensor))
    (y,) = SESSION.load(graph, weights_registry=mlp.state_dict()).execute(x)

    def product(x: Array, name: str) -> Array:
        return reference(
            x.astype(BF16),
            state[f"{name}_proj.weight"],
            state[f"{name}_proj.weight_scale"],
            cfg,
            None,
        )

    gate = product(x, "gate").astype(BF16).astype(np.float64)
    hidden = gate / (1 + np.exp(-gate)) * product(x, "up").astype(BF16).astype(np.float64)
    expected = product(hidden, "down")
    # one hidden value may be rounded to the other neighbor in float8
    error = np.abs(y.to_numpy().astype(np.float64) - expected)
    assert error.max() < 0.05 * np.abs(expected).max()
    assert error.mean() < 0.03 * np.abs(expected).mean()


def test_errors() -> None:
    e4 = DType.float8_e4m3fn
    # made, as in MAX, and refused when it is called
    unscaled = Linear(40, 8, DType.bfloat16, CPU_REF, float8_config=config(COLUMN, ROW))
    with pytest.raises(ValueError, match="one scale, for the tensor, got colwise"):
        Linear(8, 8, e4, CPU_REF, float8_config=config(COLUMN, ROW, static=True))
    with pytest.raises(ValueError, match="a scale a row of x"):
        Linear(8, 8, e4, CPU_REF, float8_config=config(ROW, ROW))
    with pytest.raises(ValueError, match="nor clamped"):
        Linear(8, 8, e4, CPU_REF, float8_config=config(COLUMN, ROW), clip_weight=1.0)
    layer = Linear(40, 24, e4, CPU_REF, float8_config=config(BLOCK, BLOCK))
    layer.sharding_strategy = ShardingStrategy.rowwise(2)
    with pytest.raises(ValueError, match="do not divide the 24 rows"):
        layer.shard([CPU_REF, CPU_REF])
    with Graph("e", input_types=[TensorType(DType.bfloat16, (4, 40), CPU_REF)]) as graph:
        with pytest.raises(ValueError, match="groups of 16 columns do not divide the 40 columns"):
            layer(graph.inputs[0].tensor)
        with pytest.raises(ValueError, match="is float8, got bfloat16"):
            unscaled(graph.inputs[0].tensor)
        with pytest.raises(ValueError, match="the last dimension"):
            layer(graph.inputs[0].tensor[:, :8])
        graph.output()
