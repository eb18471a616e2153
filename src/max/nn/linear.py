"""Linear layers and the gated MLP of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from max._earlier import earlier_names
from max.dtype import DType
from max.graph import (
    BufferValue,
    DeviceRef,
    ShardingStrategy,
    TensorValue,
    Weight,
    ops,
)
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.nn._linear_v1 import MLPV1, GPTQLinearV1, LinearV1, QLinearV1
from max.nn._projection import matmul_input, plain_dtype, project, with_bias
from max.nn._scaled import (
    dynamic_scaled_matmul,
    matmul_static_scaled_float8,
    quantize_dynamic_scaled_float8,
    quantize_static_scaled_float8,
    scale_shape,
)
from max.nn._sharding import check_strategy, part_of, parts_of_weight, shard_devices
from max.nn.clamp import clamp
from max.nn.float8_config import Float8Config
from max.nn.layer import Module

__all__ = [
    "MLP",
    "ColumnParallelLinear",
    "DistributedGemmConfig",
    "GPTQLinear",
    "GPTQLinearV1",
    "Linear",
    "LinearV1",
    "MLPV1",
    "QLinearV1",
]

ACTIVATIONS: dict[str, Callable[[TensorValue], TensorValue]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, "tanh"),
    "gelu_quick": lambda x: ops.gelu(x, "quick"),
    "relu": ops.relu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
}


class Linear(Module):
    """``y = x Wᵀ + b``.

    Shapes: ``x`` is ``[…, in_dim]``, ``y`` is ``[…, out_dim]``, of x's dtype. Sums are accumulated in
    float32. A float32 ``x`` is rounded to the dtype of bfloat16 or float16 weights; its products are not.

    Args:
        in_dim: The size of the input's last dimension.
        out_dim: The size of the output's last dimension.
        dtype: The dtype of weight and bias; for an encoded weight that of the bias, with float32 for uint8.
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
            _check_float8(dtype, float8_config, quantization_encoding, clip_weight)
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

        A row-wise split computes parts of the outputs. A column-wise split takes parts of the inputs, and the results
        must be summed; the first shard adds the bias.
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
            ValueError: There is no sharding strategy, it is for another number of devices, or the
                weight cannot be split as the strategy requires.
        """
        strategy = self.sharding_strategy
        where = shard_devices("Linear", strategy, devices)
        assert strategy is not None
        weights = self.weight.shard(where)
        of_rows = strategy.axis in (0, -2)
        whole = ShardingStrategy.replicate(len(where))
        biases = parts_of_weight(self.bias, replace(strategy, axis=0) if of_rows else whole, where)
        if strategy.axis is not None and not of_rows:
            biases[1:] = [None] * (len(where) - 1)
        parts = [
            part_of(self, Linear, weight=weight, bias=bias, device=device)
            for weight, bias, device in zip(weights, biases, where, strict=True)
        ]
        if self.float8_config is not None:
            scales = parts_of_weight(self.weight_scale, self._scale_strategy(strategy), where)
            inputs = parts_of_weight(self.input_scale, whole, where)
            for part, scale, input_scale in zip(parts, scales, inputs, strict=True):
                part.weight_scale, part.input_scale = scale, input_scale
        return parts

    def _scale_strategy(self, strategy: ShardingStrategy) -> ShardingStrategy:
        """The strategy that splits the scales with the weight.

        Raises:
            ValueError: A shard of the weight would not begin at a block of the scales.
        """
        assert self.float8_config is not None and self.weight_scale is not None
        whole = ShardingStrategy.replicate(strategy.num_devices)
        if strategy.axis is None or self.weight_scale.rank == 0:
            return whole
        axis = 0 if strategy.axis in (0, -2) else 1
        if self.weight_scale.shape[axis] == 1:
            return whole
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
            return with_bias(self.float8_product(x, self.float8_config), self.bias)
        return project(x, self.effective_weight(), self.bias, self.weight.quantization_encoding)

    def float8_product(self, x: TensorValue, config: Float8Config) -> TensorValue:
        """``x Wᵀ`` in bfloat16, with the input rounded to scaled float8.

        Args:
            x: ``[…, in_dim]``.
            config: The scales of `x`: the checkpoint's static scale, one per row, or one per group of elements of a
                row.

        Raises:
            ValueError: The last dimension is not in_dim.
        """
        weight, weight_scale = self.weight, self.weight_scale
        assert weight_scale is not None
        if x.rank < 1 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"Linear: the input is {x!r}, the weight {weight!r}; the last dimension of the input "
                "must equal the last one of the weight"
            )
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
    dtype: DType,
    config: Float8Config,
    encoding: QuantizationEncoding | None,
    clip_weight: float | None,
) -> None:
    """Checks the arguments of a float8 layer.

    Raises:
        ValueError: The config does not fit the weight.
    """
    if not dtype.is_float8():
        raise ValueError(f"Linear: a weight scaled by float8_config is float8, got {dtype.name}")
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
        tied_weight: Another layer's weight to use, ``[out_dim, in_dim]``.
        kwargs: Further arguments of `Linear`.

    Raises:
        ValueError: There is no device, or the outputs cannot be split over the devices.
    """

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
    """The computation of products over several devices.

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


class GPTQLinear(Linear):
    """``y = x Wᵀ + b`` with a GPTQ weight, in the layout of its checkpoints.

    Weights: ``qweight``, ``qzeros``, ``scales``, with `desc_act` ``g_idx``, and ``bias``; see `max.graph.ops.qmatmul`.

    Args:
        in_dim: The size of the input's last dimension.
        out_dim: The size of the output's last dimension.
        dtype: The dtype of scales and bias; uint8 stands for float16.
        device: The device of the product.
        has_bias: Whether there is a bias.
        quantization_encoding: GPTQ.
        quantization_config: The quantisation parameters of the weight.
        float8_config: Not supported.

    Raises:
        ValueError: The encoding is not GPTQ, the config is missing or not of 2, 4 or 8 bits, or the sizes are not
            multiples of the packed integers.
        NotImplementedError: `float8_config` is given.
    """

    qweight: Weight
    """int32 ``[in_dim * bits / 32, out_dim]``."""
    qzeros: Weight
    """int32 ``[groups, out_dim * bits / 32]``."""
    scales: Weight
    """``[groups, out_dim]``."""
    g_idx: Weight | None
    """int32 ``[in_dim]``: the group of each input."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: DType,
        device: DeviceRef,
        has_bias: bool = False,
        quantization_encoding: QuantizationEncoding | None = None,
        quantization_config: QuantizationConfig | None = None,
        float8_config: Float8Config | None = None,
    ) -> None:
        if float8_config is not None:
            raise NotImplementedError("GPTQLinear: float8 scales do not go with GPTQ weights")
        if quantization_encoding not in (None, QuantizationEncoding.GPTQ):
            raise ValueError(
                f"GPTQLinear: the encoding is {quantization_encoding}, expected GPTQ; use Linear"
            )
        config = quantization_config
        if config is None or config.quant_method != "gptq" or config.bits not in (2, 4, 8):
            raise ValueError(
                f"GPTQLinear: the config is {config!r}, expected quant_method gptq and 2, 4 or 8 bits"
            )
        packed = 32 // config.bits
        if in_dim % packed or out_dim % packed:
            raise ValueError(
                f"GPTQLinear: {in_dim} inputs and {out_dim} outputs, expected multiples of {packed} for "
                f"{config.bits} bits"
            )
        groups = 1 if config.group_size == -1 else -(-in_dim // config.group_size)
        dtype = dtype if dtype.is_float() else DType.float16
        self.device, self.clip_weight, self.quantization_config = device, None, config
        self.qweight = Weight("qweight", DType.int32, (in_dim // packed, out_dim), device)
        self.qzeros = Weight("qzeros", DType.int32, (groups, out_dim // packed), device)
        self.scales = Weight("scales", dtype, (groups, out_dim), device)
        order = Weight("g_idx", DType.int32, (in_dim,), device) if config.desc_act else None
        self.g_idx = order
        self.bias = Weight("bias", dtype, (out_dim,), device) if has_bias else None

    @property
    def weight(self) -> Weight:  # type: ignore[override]
        """The packed integers."""
        return self.qweight

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """None: GPTQ weights are not split. Setting another raises ValueError."""
        return None

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        if strategy is not None:
            raise ValueError("GPTQLinear: GPTQ weights are not split over devices")

    def __call__(self, x: TensorValue) -> TensorValue:
        """``x Wᵀ + b``.

        Args:
            x: ``[…, in_dim]``.

        Raises:
            ValueError: The last dimension is not in_dim.
        """
        parts: list[TensorValue] = [self.qweight, self.qzeros, self.scales]
        if self.g_idx is not None:
            parts.append(self.g_idx)
        y = ops.qmatmul(QuantizationEncoding.GPTQ, self.quantization_config, x, *parts)
        return with_bias(y, self.bias)


class MLP(Module):
    """``down(activation(gate(x)) * up(x))``, the gated MLP (https://arxiv.org/abs/2002.05202).

    Shapes: ``x`` and the result are ``[…, hidden_dim]``.

    Args:
        dtype: The dtype of the weights.
        quantization_encoding: The block encoding of the weights.
        hidden_dim: The size of the input's last dimension.
        feed_forward_length: The size between the projections.
        devices: The devices; the layer runs on the first one.
        linear_cls: The class of the projections.
        has_bias: Whether the projections have biases.
        activation_function: silu, gelu, gelu_tanh, gelu_quick, relu, tanh or sigmoid.
        float8_config: The scales of float8 weights and inputs.
        dist_gemm_config: The computation of products over several devices.

    Raises:
        ValueError: There is no device, or the activation is unknown.
    """

    def __init__(
        self,
        dtype: DType,
        quantization_encoding: QuantizationEncoding | None,
        hidden_dim: int,
        feed_forward_length: int,
        devices: Sequence[DeviceRef],
        linear_cls: Callable[..., Linear] = Linear,
        has_bias: bool = False,
        activation_function: str = "silu",
        float8_config: Float8Config | None = None,
        dist_gemm_config: DistributedGemmConfig | None = None,
    ) -> None:
        if not devices:
            raise ValueError("MLP: no device is given")
        if activation_function not in ACTIVATIONS:
            raise ValueError(
                f"MLP: the activation is {activation_function!r}, expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        self.activation_function = activation_function
        self._sharding: ShardingStrategy | None = None

        def linear(in_dim: int, out_dim: int) -> Linear:
            return linear_cls(
                in_dim=in_dim,
                out_dim=out_dim,
                dtype=dtype,
                device=devices[0],
                has_bias=has_bias,
                quantization_encoding=quantization_encoding,
                float8_config=float8_config,
            )

        self.gate_proj = linear(hidden_dim, feed_forward_length)
        self.down_proj = linear(feed_forward_length, hidden_dim)
        self.up_proj = linear(hidden_dim, feed_forward_length)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer; None: not split.

        ``tensor_parallel`` (or ``rowwise``) splits the inner features; the results of the devices must be
        summed. ``replicate`` keeps the whole layer on each device.

        Raises:
            ValueError: It is set to another strategy.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        check_strategy("MLP", strategy, "tensor_parallel", "rowwise", "replicate")
        self._sharding = strategy
        outer = inner = None
        if strategy is not None:
            whole, count = strategy.is_replicate, strategy.num_devices
            outer = strategy if whole else ShardingStrategy.rowwise(count)
            inner = strategy if whole else ShardingStrategy.columnwise(count)
        self.gate_proj.sharding_strategy = self.up_proj.sharding_strategy = outer
        self.down_proj.sharding_strategy = inner

    def shard(self, devices: Iterable[DeviceRef]) -> list[MLP]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, it is for another number of devices, or the
                weights cannot be split as the strategy requires.
        """
        where = shard_devices("MLP", self.sharding_strategy, devices)
        projections = (self.gate_proj, self.down_proj, self.up_proj)
        parts = zip(*(p.shard(where) for p in projections), strict=True)
        return [
            part_of(self, MLP, gate_proj=gate, down_proj=down, up_proj=up)
            for gate, down, up in parts
        ]

    def __call__(self, x: TensorValue) -> TensorValue:
        """``down(activation(gate(x)) * up(x))``.

        Args:
            x: ``[…, hidden_dim]``.

        Raises:
            ValueError: The last dimension is not hidden_dim.
        """
        activation = ACTIVATIONS[self.activation_function]
        gate_proj, up_proj = self.gate_proj, self.up_proj
        if type(gate_proj) is Linear and type(up_proj) is Linear:
            # x is rounded once for both products; their outputs stay in the weights' dtype
            x_in = matmul_input(x, gate_proj.weight)
        else:
            x_in = x
        hidden = activation(gate_proj(x_in)) * up_proj(x_in)
        y = self.down_proj(hidden)
        return y if y.dtype is x.dtype else ops.cast(y, x.dtype)


__getattr__ = earlier_names(__name__)
