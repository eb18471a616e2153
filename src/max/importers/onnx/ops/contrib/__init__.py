"""Ops of other domains than ONNX's own: `ai.onnx.ml`, `com.microsoft`, `ai.onnx.preview.training`."""

from max.importers.onnx.ops.contrib import (
    attention,
    encoders,
    fused,
    linear_models,
    optimizers,
    quantized,
    trees,
)

__all__ = ["attention", "encoders", "fused", "linear_models", "optimizers", "quantized", "trees"]
