"""Mixtures of experts: a gate chooses some MLPs for each token, and their weighted outputs are added.

Rows are sorted by expert, so that each chosen expert multiplies its rows in one product. The weights of experts that
were not chosen are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from max._names import keyword_aliases, lazy_names
from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding
from max.nn.activation import (
    make_concatenated_gated_activation_fn,
    make_interleaved_gated_activation_fn,
    make_stacked_gated_activation_fn,
)
from max.nn.float8_config import Float8Config
from max.nn.kernels.float8 import scaled_weights
from max.nn.layer import LayerList, Module
from max.nn.layers.experts import Activation, run_experts, swiglu
from max.nn.layers.mlp import MLP
from max.nn.layers.moe_gates import ExpertRouting, MoEGate, RoutedMoEGate, SigmoidTopKRouter
from max.nn.layers.sharding import check_strategy, part_of, shard_devices

__all__ = [
    "ExpertRouting",
    "MoE",
    "MoEFp8",
    "MoEGate",
    "RoutedMoEGate",
    "SigmoidTopKRouter",
    "make_concatenated_gated_activation_fn",
    "make_interleaved_gated_activation_fn",
    "make_stacked_gated_activation_fn",
    "run_experts",
]


class MoE(Module):
    """A mixture of gated MLPs (https://arxiv.org/abs/1701.06538), optionally with a shared expert for all tokens.

    ``Σ w[e] * down[e](silu(gate[e](x)) * up[e](x))`` over the experts ``e`` that the gate chose, with their weights
    ``w``. Sums are accumulated in float32.

    Shapes: the input and the result are ``[tokens, hidden_dim]``.

    Args:
        devices: The devices; the layer runs on the first one.
        hidden_dim: The size of the input's last dimension.
        num_experts: The number of experts.
        num_experts_per_token: The number of experts chosen for each token.
        moe_dim: The inner size of an expert, between its projections.
        gate_cls: Creates the gate; called with the keywords devices, hidden_dim, num_experts, num_experts_per_token and
            dtype.
        has_shared_experts: Whether there is also an expert that all tokens share.
        shared_experts_dim: The inner size of the shared expert.
        ep_size: Must be 1: expert parallelism over machines is not supported.
        dtype: The dtype of the weights; uint8 for encoded ones.
        apply_router_weight_first: Whether a router weight multiplies the expert's input instead of its output.
        ep_batch_manager: Must be None.
        float8_config: The scales of float8 weights; see `MoEFp8`.
        quantization_encoding: The block encoding of the experts' weights.
        activation: Maps the outputs of the gate and up projections to the input of the down projection, such as a
            `GatedActivation`; by default ``silu(gate) * up``.
        has_bias: Whether the experts' projections have biases.
        gate_dtype: The dtype of the gate's weight; by default `dtype`, or bfloat16 if that is not a float type of 16
            bits or more.

    Raises:
        ValueError: There is no device, or the sizes do not fit.
        NotImplementedError: `ep_size` is not 1, or `ep_batch_manager` is given.
    """

    @keyword_aliases(quant_config="float8_config")
    def __init__(
        self,
        devices: list[DeviceRef],
        hidden_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        moe_dim: int,
        gate_cls: Callable[..., MoEGate] = MoEGate,
        has_shared_experts: bool = False,
        shared_experts_dim: int = 0,
        ep_size: int = 1,
        dtype: DType = DType.bfloat16,
        apply_router_weight_first: bool = False,
        ep_batch_manager: Any = None,
        float8_config: Float8Config | None = None,
        *,
        quantization_encoding: QuantizationEncoding | None = None,
        activation: Activation | None = None,
        has_bias: bool = False,
        gate_dtype: DType | None = None,
    ) -> None:
        name = type(self).__name__
        if ep_size != 1 or ep_batch_manager is not None:
            raise NotImplementedError(
                f"{name}: ep_size {ep_size}; experts are not spread over machines. sharding_strategy tensor_parallel "
                "splits each expert"
            )
        if has_shared_experts and shared_experts_dim < 1:
            raise ValueError(f"{name}: shared experts with shared_experts_dim {shared_experts_dim}")
        if gate_dtype is None:
            # the scores choose experts: files of quantized models keep the gate in 16 bits
            half = dtype.is_float() and not dtype.is_float8()
            gate_dtype = dtype if half else DType.bfloat16
        self.devices = devices
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.num_local_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.moe_dim = moe_dim
        self.has_shared_experts = has_shared_experts
        self.ep_size = ep_size
        self.dtype = dtype
        self.apply_router_weight_first = apply_router_weight_first
        self.float8_config = float8_config
        self.quantization_encoding = quantization_encoding
        self.activation = swiglu if activation is None else activation
        self.has_bias = has_bias
        self._sharding: ShardingStrategy | None = None
        self.gate = gate_cls(
            devices=devices,
            hidden_dim=hidden_dim,
            num_experts=num_experts,
            num_experts_per_token=num_experts_per_token,
            dtype=gate_dtype,
        )

        def mlp(inner: int, biased: bool) -> MLP:
            return MLP(
                dtype, quantization_encoding, hidden_dim, inner, devices,
                has_bias=biased, float8_config=float8_config,
            )  # fmt: skip

        if has_shared_experts:
            self.shared_experts = mlp(shared_experts_dim, False)
        self.experts = LayerList([mlp(moe_dim, has_bias) for _ in range(num_experts)])

    @property
    def ep_batch_manager(self) -> Any:
        """The manager of expert parallelism over machines.

        Raises:
            ValueError: Always; there is no manager.
        """
        raise ValueError(f"{type(self).__name__}: experts are not spread over machines")

    def _stack_parameter(self, *names: str, part: str = "weight") -> TensorValue:
        """A parameter of all experts' projections, stacked: ``[num_experts, …]``."""
        values: list[Weight] = [
            getattr(getattr(expert, name), part) for expert in self.experts for name in names
        ]
        if values[0].rank == 0:
            # one scale per matrix
            return ops.reshape(ops.stack(values), [self.num_experts, len(names)])
        # [experts * names * rows, columns], then [experts, names * rows, columns]
        rows = ops.concat(values, axis=0)
        count = int(values[0].shape[0]) * len(names)
        return ops.reshape(rows, [self.num_experts, count, *values[0].shape[1:]])

    @property
    def gate_up_proj(self) -> TensorValue:
        """The weights of gate and up projections, ``[num_experts, 2 * moe_dim, hidden_dim]``, in the graph."""
        return self._stack_parameter("gate_proj", "up_proj")

    @property
    def down_proj(self) -> TensorValue:
        """The weights of the down projections, ``[num_experts, hidden_dim, moe_dim]``, in the graph."""
        return self._stack_parameter("down_proj")

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer; None: not split.

        ``tensor_parallel`` splits the inner features of each expert; the results must be summed. ``replicate`` gives
        each device the whole layer.

        Raises:
            ValueError: It is set to another strategy.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        check_strategy(type(self).__name__, strategy, "tensor_parallel", "replicate")
        self._sharding = strategy
        replicated = None if strategy is None else ShardingStrategy.replicate(strategy.num_devices)
        # each device chooses the same experts, and computes its part of each of them
        self.gate.sharding_strategy = replicated
        for mlp in (*self.experts, *([self.shared_experts] if self.has_shared_experts else [])):
            mlp.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[MoE]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, its number of devices differs, or the weights cannot be split in
                this way.
        """
        where = shard_devices(type(self).__name__, self.sharding_strategy, devices)
        gates = self.gate.shard(where)
        experts = list(zip(*(expert.shard(where) for expert in self.experts), strict=True))
        shared = (
            self.shared_experts.shard(where) if self.has_shared_experts else [None] * len(where)
        )
        parts: list[MoE] = []
        for i, device in enumerate(where):
            changed: dict[str, Any] = {
                "devices": [device], "gate": gates[i], "experts": LayerList(list(experts[i]))
            }  # fmt: skip
            if shared[i] is not None:
                changed["shared_experts"] = shared[i]
            parts.append(part_of(self, type(self), **changed))
        return parts

    def __call__(self, x: TensorValue) -> TensorValue:
        """The weighted sum of the outputs of the chosen experts, plus the output of the shared expert.

        Args:
            x: ``[tokens, hidden_dim]``.

        Raises:
            ValueError: The shape of the input does not match.
        """
        experts, weights = self.gate(x)
        y = self._run_experts(x, experts, weights)
        return y + self.shared_experts(x) if self.has_shared_experts else y

    def _run_experts(
        self, x: TensorValue, experts: TensorValue, weights: TensorValue
    ) -> TensorValue:
        gate_up, down = self._weights()
        biased = self.has_bias
        # only the first shard of a split layer adds the bias
        has_down_bias = biased and self.experts[0].down_proj.bias is not None
        return run_experts(
            x,
            experts,
            weights,
            gate_up,
            down,
            activation=self.activation,
            gate_up_bias=self._stack_parameter("gate_proj", "up_proj", part="bias")
            if biased
            else None,
            down_bias=self._stack_parameter("down_proj", part="bias") if has_down_bias else None,
            weights_first=self.apply_router_weight_first,
            gate_up_encoding=self.quantization_encoding,
            down_encoding=self.quantization_encoding,
        )

    def _weights(self) -> tuple[TensorValue, TensorValue]:
        """The weights of the grouped products."""
        return self.gate_up_proj, self.down_proj


class MoEFp8(MoE):
    """`MoE` with float8 weights. Scales are applied once, at load time; inputs are not rounded to float8.

    Args: those of `MoE`; `float8_config` is needed, and `dtype` is the float8 type of the weights.

    Raises:
        ValueError: There is no config, or it does not fit the weights.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.float8_config is None:
            raise ValueError("MoEFp8: float8_config is needed")

    @property
    def gate_up_proj_scales(self) -> TensorValue:
        """The scales of gate and up projections, ``[num_experts, row blocks, column blocks]``, in the graph."""
        return self._stack_parameter("gate_proj", "up_proj", part="weight_scale")

    @property
    def down_proj_scales(self) -> TensorValue:
        """The scales of the down projections, ``[num_experts, row blocks, column blocks]``, in the graph."""
        return self._stack_parameter("down_proj", part="weight_scale")

    def _weights(self) -> tuple[TensorValue, TensorValue]:
        config = self.float8_config
        assert config is not None
        blocks = config.weight_scale.block_size
        if config.weight_scale.is_colwise:
            raise ValueError("MoEFp8: scales of columns differ between gate and up projections")

        def scale_tokens(
            what: str, weight: TensorValue, scales: TensorValue, matrices: int
        ) -> TensorValue:
            count, rows, columns = weight.shape
            # the blocks of each matrix start at its first row
            apart = ops.reshape(weight, [count * matrices, int(rows) // matrices, columns])
            of_each = (
                ops.reshape(scales, [count * matrices])
                if scales.rank == 2
                else ops.reshape(
                    scales, [count * matrices, int(scales.shape[1]) // matrices, scales.shape[2]]
                )
            )
            return ops.reshape(scaled_weights(what, apart, of_each, blocks), weight.shape)

        return (
            scale_tokens("MoEFp8.gate_up_proj", self.gate_up_proj, self.gate_up_proj_scales, 2),
            scale_tokens("MoEFp8.down_proj", self.down_proj, self.down_proj_scales, 1),
        )


__getattr__ = lazy_names(__name__)
