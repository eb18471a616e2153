"""`QuantConfig` of version 26: what it says, and that layers compute with it as with a `Float8Config`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Shape, TensorType
from max.nn import Float8Config, Linear, QuantConfig, QuantFormat
from max.nn.quant_config import InputScaleSpec, ScaleGranularity, ScaleOrigin, WeightScaleSpec

CPU_REF = DeviceRef.CPU()
FP8 = DType.float8_e4m3fn


def of_rows() -> QuantConfig:
    return QuantConfig(
        InputScaleSpec(ScaleGranularity.COLWISE, ScaleOrigin.DYNAMIC, DType.float32),
        WeightScaleSpec(ScaleGranularity.ROWWISE, DType.float32),
        {0},
        {1},
        QuantFormat.FBGEMM_FP8,
    )


def test_answers_of_26_7() -> None:
    """Each value is what an installed 26.7 answers."""
    blocks = QuantConfig.blockscaled_fp8(mlp_quantized_layers=[0, 1], attn_quantized_layers=[1])
    assert blocks.scales_granularity_mnk == (1, 128, 128)
    assert blocks.is_dynamic and not blocks.is_static
    assert (blocks.mlp_quantized_layers, blocks.attn_quantized_layers) == ({0, 1}, {1})
    for width in (256, 200):
        scales = blocks.quantized_scales_type(Shape((6, width)), CPU_REF)
        assert scales == TensorType(DType.float32, (2, 6), CPU_REF)
    symbolic = blocks.quantized_scales_type(Shape(("n", 256)), CPU_REF)
    assert symbolic == TensorType(DType.float32, (2, "n"), CPU_REF)
    assert blocks.shared_experts_dtype(FP8) is FP8 and blocks.shared_experts_use_quant(FP8)
    blocks.shared_experts_weight_dtype = DType.bfloat16
    assert blocks.shared_experts_dtype(FP8) is DType.bfloat16
    assert not blocks.shared_experts_use_quant(FP8)
    rows = of_rows()
    assert rows.scales_granularity_mnk == (1, 1, -1)
    with pytest.raises(ValueError, match="inputs are scaled by colwise, expected block"):
        rows.quantized_scales_type(Shape((6, 256)), CPU_REF)
    assert QuantFormat("nvfp4") is QuantFormat.NVFP4
    assert rows == of_rows() and rows != blocks


def test_formats_that_no_layer_runs() -> None:
    rows = of_rows()
    for format in (QuantFormat.NVFP4, QuantFormat.MXFP6, QuantFormat.INT8_W8A8):
        with pytest.raises(NotImplementedError, match=f"no layer runs the format {format.value}"):
            QuantConfig(rows.input_scale, rows.weight_scale, {0}, {0}, format)


def test_layers_compute_with_it(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((32, 48)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2.0, (2, 3)).astype(np.float32)
    x = rng.standard_normal((5, 48)).astype(np.float32)
    quantized = QuantConfig.blockscaled_fp8(
        mlp_quantized_layers=[0], attn_quantized_layers=[0], block_size=16
    )
    plain = Float8Config(quantized.input_scale, quantized.weight_scale, {0}, {0})
    results: list[np.ndarray] = []
    for given in ({"quant_config": quantized}, {"float8_config": plain}):
        linear = Linear(48, 32, FP8, CPU_REF, **given)
        linear.load_state_dict({"weight": weight, "weight_scale": scales})
        graph = Graph("q", linear, input_types=[TensorType(DType.float32, x.shape, CPU_REF)])
        model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=linear.state_dict())
        results.append(model.execute(x)[0].to_numpy())
    np.testing.assert_array_equal(*results)
    whole = weight.astype(np.float32) * np.kron(scales, np.ones((16, 16), np.float32))
    error = np.abs(results[0] - x @ whole.T).max() / np.abs(x @ whole.T).max()
    assert error < 0.05
    with pytest.raises(TypeError, match="quant_config and float8_config are one argument"):
        Linear(48, 32, FP8, CPU_REF, quant_config=quantized, float8_config=plain)
