"""Linear layers, whole and with their outputs divided over devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from max._names import keyword_aliases
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding
from max.nn.clamp import clamp
from max.nn.float8_config import Float8Config
from max.nn.kernels.float8 import (
    dynamic_scaled_matmul,
    matmul_static_scaled_float8,
    quantize_dynamic_scaled_float8,
    quantize_static_scaled_float8,
    scale_shape,
)
from max.nn.kernels.products import plain_dtype, project, with_bias
from max.nn.layer import Module
from max.nn.layers.sharding import part_of, parts_of_weight, shard_devices

__all__ = ["ColumnParallelLinear", "DistributedGemmConfig", "Linear"]


class Linear(Module):
    """``y = x Wᵀ + b``.

    Shapes: ``x`` is ``[…, in_dim]``, ``y`` is ``[…, out_dim]``, of x's dtype. Sums are accumulated in
    float32. If the weights are bfloat16 or float16, a float32 ``x`` is rounded to their dtype; the result stays
    float32.

    Args:
        in_dim: The size of the input's last dimension.
        out_dim: The size of the output's last dimension.
        dtype: The dtype of weight and bias. If the weight is encoded, the dtype of the bias; uint8 then stands for
            float32.
        device: The device of the product.
        has_bias: Whether there is a bias.
        quantization_encoding: The block encoding of the weight; see `max.graph.ops.qmatmul`.
        float8_config: The scales of a float8 weight and its input; see `float8_product`.
        name: The prefix of the weights' names.
        clip_weight: A bound: the weight is clamped to ``[-clip_weight, clip_weight]``.

    Raises:
        ValueError: The encoding is not a block encoding, `in_dim` is not a multiple of its block, `clip_weight` is
            set for an encoded weight, or the config does not match the weight.
    """

    __module__ = "max.nn.linear"

    weight: Weight
    """``[out_dim, in_dim]``, or its rows in encoded blocks."""

    bias: Weight | None = None
    """``[out_dim]``."""

    input_scale: Weight | None = None
    """The static scale of a float8 layer's input, from the checkpoint."""

    weight_scale: Weight | None = None
    """The scales of a float8 weight."""

    float8_config: Float8Config | None = None
    """The scales of a float8 layer."""

    device: DeviceRef
    """The device of the product."""

    _product_change: Callable[[TensorValue, TensorValue], TensorValue] | None = None

    @keyword_aliases(quant_config="float8_config")
    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: DType,
        device: DeviceRef,
        has_bias: bool = False,
        quantization_encoding: QuantizationEncoding | None = None,
        float8_config: Float8Config | None = None,
        name: str | None = None,
        clip_weight: float | None = None,
    ) -> None:
        if float8_config is not None:
            _check_float8(float8_config, quantization_encoding, clip_weight)
        if quantization_encoding is not None:
            if not quantization_encoding.is_gguf:
                raise ValueError(
                    f"Linear: a {quantization_encoding.value} weight comes in parts; use GPTQLinear"
                )
            if clip_weight is not None:
                raise ValueError(f"Linear: a {quantization_encoding.value} weight is not clamped")
            dtype = plain_dtype(dtype, quantization_encoding)
        prefix = f"{name}." if name else ""
        self.device = device
        self.clip_weight = clip_weight
        self.weight = Weight(
            f"{prefix}weight", dtype, (out_dim, in_dim), device, quantization_encoding
        )
        self.bias = None
        if has_bias:
            bias_dtype = float8_config.bias_dtype if float8_config else None
            self.bias = Weight(f"{prefix}bias", bias_dtype or dtype, (out_dim,), device)
        self.float8_config = float8_config
        if float8_config is not None:
            spec = float8_config.weight_scale
            shape = scale_shape(spec, out_dim, in_dim)
            self.weight_scale = Weight(f"{prefix}weight_scale", spec.dtype, shape, device)
            if float8_config.is_static:
                static = float8_config.input_scale.dtype
                self.input_scale = Weight(f"{prefix}input_scale", static, (), device)

    def effective_weight(self) -> TensorValue:
        """The weight in the graph, clamped if `clip_weight` is set."""
        weight: TensorValue = self.weight
        if self.clip_weight is not None:
            weight = clamp(weight, min=-self.clip_weight, max=self.clip_weight)
        return weight

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the weight; None: not split.

        With a row-wise split each shard computes a part of the outputs. With a column-wise split each shard takes a
        part of the inputs, and the results must be summed; the first shard adds the bias.
        """
        return self.weight.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        self.weight.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[Linear]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, its number of devices differs, or the
                weight cannot be split as the strategy requires.
        """
        strategy = self.sharding_strategy
        where = shard_devices("Linear", strategy, devices)
        assert strategy is not None
        weights = self.weight.shard(where)
        of_rows = strategy.axis in (0, -2)
        replicated = ShardingStrategy.replicate(len(where))
        biases = parts_of_weight(
            self.bias, replace(strategy, axis=0) if of_rows else replicated, where
        )
        if strategy.axis is not None and not of_rows:
            # parts of the inputs are summed: only one of them adds the bias
            biases[1:] = [None] * (len(where) - 1)
        parts = [
            part_of(self, Linear, weight=weight, bias=bias, device=device)
            for weight, bias, device in zip(weights, biases, where, strict=True)
        ]
        if self.float8_config is not None:
            scales = parts_of_weight(self.weight_scale, self._scale_strategy(strategy), where)
            inputs = parts_of_weight(self.input_scale, replicated, where)
            for part, scale, input_scale in zip(parts, scales, inputs, strict=True):
                part.weight_scale, part.input_scale = scale, input_scale
        return parts

    def _scale_strategy(self, strategy: ShardingStrategy) -> ShardingStrategy:
        """The strategy that splits the scales like the weight.

        Raises:
            ValueError: A shard of the weight would not begin at a block of the scales.
        """
        assert self.float8_config is not None and self.weight_scale is not None
        replicated = ShardingStrategy.replicate(strategy.num_devices)
        if strategy.axis is None or self.weight_scale.rank == 0:
            return replicated
        axis = 0 if strategy.axis in (0, -2) else 1
        # one scale along the axis that is split serves all parts
        if self.weight_scale.shape[axis] == 1:
            return replicated
        block = self.float8_config.weight_scale.block_size
        size = int(self.weight.shape[axis])
        if block is not None and size % (block[axis] * strategy.num_devices):
            raise ValueError(
                f"Linear: {strategy.num_devices} devices do not divide the {size} "
                f"{('rows', 'columns')[axis]} of the weight into whole blocks of {block[axis]}"
            )
        return replace(strategy, axis=axis)

    def __call__(self, x: TensorValue) -> TensorValue:
        """``x Wᵀ + b``.

        Args:
            x: ``[…, in_dim]``.

        Raises:
            ValueError: The last dimension is not in_dim.
        """
        if self.float8_config is not None:
            y = self.float8_product(x, self.float8_config)
        else:
            y = project(x, self.effective_weight(), encoding=self.weight.quantization_encoding)
        return self.with_terms(x, y)

    def change_products(self, change: Callable[[TensorValue, TensorValue], TensorValue]) -> None:
        """Replaces the layer's products, to which the bias is added then, such as by their sum with the terms of an
        adapter.

        Args:
            change: Called with x and ``x Wᵀ``; it returns the new products.
        """
        self._product_change = change

    def with_terms(self, x: TensorValue, y: TensorValue) -> TensorValue:
        """The result for the products ``y``: changed as `change_products` says, and with the bias."""
        change = self._product_change
        return with_bias(y if change is None else change(x, y), self.bias)

    def float8_product(self, x: TensorValue, config: Float8Config) -> TensorValue:
        """``x Wᵀ`` as bfloat16, with the input rounded to scaled float8.

        Args:
            x: ``[…, in_dim]``.
            config: The scales of `x`: the checkpoint's static scale, one scale per row, or one per group of elements of
                a row.

        Raises:
            ValueError: The last dimension is not in_dim, or the weight is not float8.
        """
        weight, weight_scale = self.weight, self.weight_scale
        assert weight_scale is not None
        if not weight.dtype.is_float8():
            raise ValueError(
                f"Linear: a weight scaled by float8_config is float8, got {weight.dtype.name}"
            )
        if x.rank < 1 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"Linear: the input is {x!r}, the weight {weight!r}; the last dimension of the input "
                "must equal the last one of the weight"
            )
        # scales are by row: the leading axes become one
        rows = x if x.rank == 2 else ops.reshape(x, (-1, weight.shape[1]))
        spec = config.input_scale
        if self.input_scale is not None:
            elements = quantize_static_scaled_float8(rows, self.input_scale, out_type=weight.dtype)
            y = matmul_static_scaled_float8(elements, weight, self.input_scale, weight_scale)
        else:
            elements, scales = quantize_dynamic_scaled_float8(
                rows,
                spec,
                config.weight_scale,
                scale_ub=spec.activation_scale_ub or math.inf,
                group_size_or_per_token=spec.block_size[1] if spec.block_size else -1,
                out_type=weight.dtype,
                scales_type=spec.dtype,
            )
            y = dynamic_scaled_matmul(
                elements, weight, scales, weight_scale, spec, config.weight_scale
            )
        return y if x.rank == 2 else ops.reshape(y, (*x.shape[:-1], weight.shape[0]))


def _check_float8(
    config: Float8Config,
    encoding: QuantizationEncoding | None,
    clip_weight: float | None,
) -> None:
    """Checks the arguments of a float8 layer.

    Raises:
        ValueError: The config does not fit the weight.
    """
    if encoding is not None or clip_weight is not None:
        raise ValueError("Linear: a float8 weight is neither encoded in blocks nor clamped")
    spec = config.input_scale
    if spec.is_rowwise or (spec.block_size is not None and spec.block_size[0] != 1):
        granularity = spec.granularity.value + (f" of {spec.block_size}" if spec.block_size else "")
        raise ValueError(
            f"Linear: inputs are scaled as a tensor, colwise (a scale a row of x) or in blocks of one "
            f"row, got {granularity}"
        )
    if config.is_static and not spec.is_tensor:
        raise ValueError(
            f"Linear: a static input has one scale, for the tensor, got {spec.granularity.value}"
        )


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are computed in parts, one per device, and gathered on all devices.

    Args:
        in_dim: The size of the inputs' last dimension.
        out_dim: The size of the outputs' last dimension.
        dtype: The dtype of weight and bias.
        devices: The devices of the parts.
        tied_weight: A weight of another layer that this layer shares, ``[out_dim, in_dim]``.
        kwargs: Further arguments of `Linear`.

    Raises:
        ValueError: There is no device, or the outputs cannot be split over the devices.
    """

    __module__ = "max.nn.linear"

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: DType,
        devices: Sequence[DeviceRef],
        tied_weight: Weight | None = None,
        **kwargs: Any,
    ) -> None:
        if not devices:
            raise ValueError("ColumnParallelLinear: no device is given")
        super().__init__(in_dim, out_dim, dtype, devices[0], **kwargs)
        if tied_weight is not None:
            self.set_shared_weight("weight", tied_weight)
        self.devices = list(devices)
        self.sharding_strategy = ShardingStrategy.rowwise(len(devices))
        self._parts = self.shard(devices)

    def __call__(  # type: ignore[override]
        self, x: Sequence[TensorValue], signal_buffers: Iterable[BufferValue]
    ) -> list[TensorValue]:
        """``x Wᵀ + b`` on each device.

        Args:
            x: The same ``[…, in_dim]`` on each device.
            signal_buffers: One signal buffer per device; see `max.nn.comm.Signals`.

        Raises:
            ValueError: The number of inputs differs from the number of devices, or a shape does not fit.
        """
        if len(x) != len(self._parts):
            raise ValueError(
                f"ColumnParallelLinear: {len(x)} inputs for {len(self._parts)} devices"
            )
        outputs = [part(value) for part, value in zip(self._parts, x, strict=True)]
        return ops.allgather(outputs, signal_buffers, axis=-1)


@dataclass
class DistributedGemmConfig:
    """Options of matrix products over several devices.

    Args:
        enable_matmul_allreduce: Whether a product and the sum of its parts are fused. On CPU devices the compiler
            fuses the sum into the product's epilogue where possible.
    """

    enable_matmul_allreduce: bool
    """Whether a product and the sum of its parts are fused."""

    @staticmethod
    def generate() -> DistributedGemmConfig | None:
        """The default."""
        return DistributedGemmConfig(enable_matmul_allreduce=True)


# the decorator looks the module up, which may not be loaded
DistributedGemmConfig.__module__ = "max.nn.linear"
