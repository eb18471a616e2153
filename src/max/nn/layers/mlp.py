"""The gated MLP of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from max._names import keyword_aliases
from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, ops
from max.graph.quantization import QuantizationEncoding
from max.nn.activation import ACTIVATIONS, activation_named, check_limit, limited_product
from max.nn.float8_config import Float8Config
from max.nn.kernels.products import matmul_input
from max.nn.layer import Module
from max.nn.layers.linear import DistributedGemmConfig, Linear
from max.nn.layers.sharding import check_strategy, part_of, shard_devices

__all__ = ["MLP"]


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
        dist_gemm_config: Options of matrix products over several devices.
        swiglu_limit: The upper bound of the activation and the bound of the magnitude of the factor that it multiplies;
            0: no bounds.

    Raises:
        ValueError: There is no device, the activation is unknown, or the limit is negative.
    """

    __module__ = "max.nn.linear"

    @keyword_aliases(quant_config="float8_config")
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
        swiglu_limit: float = 0.0,
    ) -> None:
        check_limit("MLP", swiglu_limit)
        self.swiglu_limit = swiglu_limit
        if not devices:
            raise ValueError("MLP: no device is given")
        activation_named(activation_function, "MLP")
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
            replicated, count = strategy.is_replicate, strategy.num_devices
            outer = strategy if replicated else ShardingStrategy.rowwise(count)
            # the parts of down_proj give partial sums
            inner = strategy if replicated else ShardingStrategy.columnwise(count)
        self.gate_proj.sharding_strategy = self.up_proj.sharding_strategy = outer
        self.down_proj.sharding_strategy = inner

    def shard(self, devices: Iterable[DeviceRef]) -> list[MLP]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, its number of devices differs, or the
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
            # x is rounded once for both products; their outputs keep the dtype of the weights
            x_in = matmul_input(x, gate_proj.weight)
        else:
            x_in = x
        hidden = limited_product(activation(gate_proj(x_in)), up_proj(x_in), self.swiglu_limit)
        y = self.down_proj(hidden)
        return y if y.dtype is x.dtype else ops.cast(y, x.dtype)
