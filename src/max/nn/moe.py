"""Mixtures of experts: a gate chooses some MLPs for each token, whose weighted results are added.

Rows are sorted by expert, so that each expert that was chosen multiplies its rows at once; the weights of others are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding
from max.nn._experts import grouped_matmul_ragged, moe_create_indices
from max.nn._projection import project
from max.nn._scaled import scaled_weights
from max.nn._sharding import check_strategy, part_of, shard_devices
from max.nn.float8_config import Float8Config
from max.nn.layer import LayerList, Module
from max.nn.linear import MLP, Linear

__all__ = ["ExpertRouting", "MoE", "MoEFp8", "MoEGate", "RoutedMoEGate", "run_experts"]

Activation = Callable[[TensorValue, TensorValue], TensorValue]
"""From the results of gate and up projection to the input of the down projection."""


def _swiglu(gate: TensorValue, up: TensorValue) -> TensorValue:
    return ops.silu(gate) * up


class MoEGate(Module):
    """Chooses experts by a linear layer: those of the greatest scores, which are their weights.

    Args:
        devices: The devices; the gate runs on the first one.
        hidden_dim: The size of the input's last dimension.
        num_experts: The number of experts.
        num_experts_per_token: The number of experts of a token.
        dtype: The dtype of the weight.

    Raises:
        ValueError: No device, or the numbers do not fit.
    """

    def __init__(
        self,
        devices: list[DeviceRef],
        hidden_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        dtype: DType,
    ) -> None:
        name = type(self).__name__
        if not devices:
            raise ValueError(f"{name}: no device is given")
        if not 0 < num_experts_per_token <= num_experts:
            raise ValueError(
                f"{name}: {num_experts_per_token} of {num_experts} experts for a token"
            )
        self.devices = devices
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.dtype = dtype
        self.gate_score = Linear(hidden_dim, num_experts, dtype, devices[0])
        self._sharding: ShardingStrategy | None = None

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the gate: ``replicate`` gives each device the whole gate.

        Raises:
            ValueError: It is set to another strategy.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        check_strategy("MoEGate", strategy, "replicate")
        self._sharding = strategy
        self.gate_score.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> Sequence[MoEGate]:
        """The gate on each device.

        Args:
            devices: The devices.

        Raises:
            ValueError: There is no sharding strategy, or it is for another number of devices.
        """
        where = shard_devices("MoEGate", self.sharding_strategy, devices)
        return [
            part_of(self, type(self), gate_score=score, devices=[device])
            for score, device in zip(self.gate_score.shard(where), where, strict=True)
        ]

    def __call__(self, hidden_state: TensorValue) -> tuple[TensorValue, TensorValue]:
        """The experts of each token, and their weights.

        Args:
            hidden_state: ``[tokens, hidden_dim]``.

        Returns:
            int64 ``[tokens, num_experts_per_token]``, and of that shape the scores, the greatest first.
        """
        scores = self.gate_score(hidden_state)
        weights, experts = ops.top_k(scores, self.num_experts_per_token)
        return experts, weights


@dataclass(frozen=True)
class ExpertRouting:
    """How scores become choices and weights.

    Args:
        scoring: The function of a token's logits: softmax over all experts, softmax over the chosen ones, sigmoid, or
            sparsemixer (https://arxiv.org/abs/2409.12136): each of two experts has the softmax over the logits near its
            own, of experts not chosen before it.
        normalised: Whether the weights of a token are divided by their sum.
        scale: What weights are multiplied by in the end.
        groups: The number of groups of neighbouring experts; experts of the best groups can be chosen.
        chosen_groups: The number of these best groups.
        group_score: A group's score: its greatest, or the sum of the two greatest.
        has_correction: Whether a number is added to each expert's score for the choice only: ``e_score_correction_bias``.
        in_float32: Whether a 16-bit gate multiplies in float32, and its products are not rounded.
        least_sum: The least divisor of normalised weights.
        jitter: Of sparsemixer: logits that are farther from the chosen one, relative to their size, than twice this do
            not count.
    """

    scoring: Literal["softmax", "softmax_of_chosen", "sigmoid", "sparsemixer"] = "softmax"
    normalised: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["greatest", "two_greatest"] = "greatest"
    has_correction: bool = False
    in_float32: bool = False
    least_sum: float = 0.0
    jitter: float = 0.01


class RoutedMoEGate(MoEGate):
    """A gate with the routing of a family of models: of Mixtral, OLMoE, Qwen, GPT-OSS, DeepSeek and others.

    Scores are computed in float32. For the `gate_cls` of `MoE`: ``functools.partial(RoutedMoEGate, routing=…)``.

    Args:
        devices: The devices; the gate runs on the first one.
        hidden_dim: The size of the input's last dimension.
        num_experts: The number of experts.
        num_experts_per_token: The number of experts of a token.
        dtype: The dtype of the weight.
        routing: How scores become choices and weights.
        has_bias: Whether the linear layer has a bias.

    Raises:
        ValueError: The groups do not divide the experts, or have too few of them.
    """

    e_score_correction_bias: Weight | None
    """float32 ``[num_experts]``: what is added to scores for the choice."""

    def __init__(
        self,
        devices: list[DeviceRef],
        hidden_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        dtype: DType,
        routing: ExpertRouting = ExpertRouting(),
        has_bias: bool = False,
    ) -> None:
        super().__init__(devices, hidden_dim, num_experts, num_experts_per_token, dtype)
        groups, chosen = routing.groups, routing.chosen_groups
        in_group = num_experts // groups
        if (
            num_experts % groups
            or not 0 < chosen <= groups
            or in_group * chosen < num_experts_per_token
        ):
            raise ValueError(
                f"RoutedMoEGate: {chosen} of {groups} groups of {num_experts} experts for "
                f"{num_experts_per_token} experts of a token"
            )
        if routing.scoring == "sparsemixer" and num_experts_per_token != 2:
            raise ValueError(
                f"RoutedMoEGate: sparsemixer chooses 2 experts for a token, not {num_experts_per_token}"
            )
        self.routing = routing
        if has_bias:
            self.gate_score = Linear(hidden_dim, num_experts, dtype, devices[0], has_bias=True)
        self.e_score_correction_bias = (
            Weight("e_score_correction_bias", DType.float32, (num_experts,), devices[0])
            if routing.has_correction
            else None
        )

    def __call__(self, hidden_state: TensorValue) -> tuple[TensorValue, TensorValue]:
        """The experts of each token, and their weights.

        Args:
            hidden_state: ``[tokens, hidden_dim]``.

        Returns:
            int64 ``[tokens, num_experts_per_token]``, and of that shape the weights, float32.
        """
        routing = self.routing
        if routing.in_float32:
            weight = ops.cast(self.gate_score.weight, DType.float32)
            logits = project(ops.cast(hidden_state, DType.float32), weight, self.gate_score.bias)
        else:
            logits = ops.cast(self.gate_score(hidden_state), DType.float32)
        if routing.scoring == "sparsemixer":
            return self._sparsemixer(logits)
        scores = logits
        if routing.scoring == "softmax":
            scores = ops.softmax(logits)
        elif routing.scoring == "sigmoid":
            scores = ops.sigmoid(logits)
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias.to(choice.device)
        if routing.groups > 1:
            choice = self._of_best_groups(choice)
        _, experts = ops.top_k(choice, self.num_experts_per_token)
        weights = ops.gather_nd(scores, ops.unsqueeze(experts, -1), batch_dims=1)
        if routing.scoring == "softmax_of_chosen":
            weights = ops.softmax(weights)
        if routing.normalised:
            total = ops.sum(weights, axis=-1)
            if routing.least_sum:
                total = ops.max(total, routing.least_sum)
            weights = weights / (total + 1e-20 if routing.scoring == "sigmoid" else total)
        return experts, weights if routing.scale == 1.0 else weights * routing.scale

    def _sparsemixer(self, logits: TensorValue) -> tuple[TensorValue, TensorValue]:
        """The two experts of the greatest logits, and the weights of sparsemixer."""
        best, experts = ops.top_k(logits, 2)
        zero = ops.constant(0.0, DType.float32, logits.device)
        numbers = ops.range(
            0,
            self.num_experts,
            1,
            out_dim=self.num_experts,
            dtype=DType.int64,
            device=logits.device,
        )
        is_first = ops.equal(experts[:, :1], ops.unsqueeze(numbers, 0))
        weights: list[TensorValue] = []
        for place in range(2):
            chosen = best[:, place : place + 1]
            # the factor of a logit below the chosen one is its size, at least the chosen one
            distance = (chosen - logits) / ops.max(ops.abs(logits), chosen)
            far = ops.greater(distance, 2 * self.routing.jitter)
            shares = ops.where(far, zero, ops.exp(ops.min(logits - chosen, zero)))
            if place:
                shares = ops.where(is_first, zero, shares)
            weights.append(1.0 / ops.sum(shares, axis=-1))
        weight = ops.concat(weights, axis=-1)
        return experts, weight if self.routing.scale == 1.0 else weight * self.routing.scale

    def _of_best_groups(self, choice: TensorValue) -> TensorValue:
        """The scores, -inf for experts of groups that are not among the best."""
        routing = self.routing
        tokens, groups = choice.shape[0], routing.groups
        grouped = ops.reshape(choice, [tokens, groups, self.num_experts // groups])
        if routing.group_score == "greatest":
            group_scores = ops.max(grouped, axis=-1)
        else:
            two, _ = ops.top_k(grouped, min(2, self.num_experts // groups))
            group_scores = ops.sum(two, axis=-1)
        _, best = ops.top_k(ops.reshape(group_scores, [tokens, groups]), routing.chosen_groups)
        numbers = ops.range(0, groups, 1, out_dim=groups, dtype=DType.int64, device=choice.device)
        among = ops.equal(ops.unsqueeze(best, -1), ops.reshape(numbers, [1, 1, groups]))
        among = ops.max(ops.cast(among, DType.int32), axis=1)
        seen = ops.greater(ops.reshape(among, [tokens, groups, 1]), 0)
        hidden = ops.constant(float("-inf"), choice.dtype, choice.device)
        return ops.reshape(ops.where(seen, grouped, hidden), choice.shape)


def run_experts(
    x: TensorValue,
    experts: TensorValue,
    weights: TensorValue,
    gate_up: TensorValue | tuple[TensorValue, TensorValue],
    down: TensorValue,
    *,
    activation: Activation = _swiglu,
    gate_up_bias: TensorValue | tuple[TensorValue, TensorValue] | None = None,
    down_bias: TensorValue | None = None,
    weights_first: bool = False,
    gate_up_encoding: QuantizationEncoding
    | tuple[QuantizationEncoding | None, QuantizationEncoding | None]
    | None = None,
    down_encoding: QuantizationEncoding | None = None,
) -> TensorValue:
    """The weighted sum of the gated MLPs that were chosen for each token.

    Args:
        x: ``[tokens, hidden_dim]``.
        experts: The experts of each token, integers ``[tokens, k]``.
        weights: Their weights, ``[tokens, k]``.
        gate_up: The weights of gate and up projections, ``[num_experts, 2 * moe_dim, hidden_dim]`` (gate first), or a pair of
            ``[num_experts, moe_dim, hidden_dim]``; encoded ones have bytes in their last dimension.
        down: ``[num_experts, hidden_dim, moe_dim]``.
        activation: From the results of gate and up projection to the input of the down projection.
        gate_up_bias: ``[num_experts, 2 * moe_dim]``; for a pair of weights also a pair of ``[num_experts, moe_dim]``.
        down_bias: ``[num_experts, hidden_dim]``.
        weights_first: Whether tokens are multiplied by their weights, and not results.
        gate_up_encoding: The encoding of the gate and up projections, or for a pair of weights those of each; None: not
            encoded.
        down_encoding: The encoding of the down projection.

    Returns:
        ``[tokens, hidden_dim]``, of the dtype of `x`.

    Raises:
        ValueError: A shape does not fit.
    """
    if x.rank != 2 or experts.rank != 2 or experts.shape != weights.shape:
        raise ValueError(
            f"run_experts: tokens {x!r}, experts {experts!r} and weights {weights!r}; expected [tokens, hidden_dim] and "
            "[tokens, k] twice"
        )
    tokens, count = experts.shape
    chosen = ops.reshape(experts, [tokens * count])
    order, starts, restored, ids, stats = moe_create_indices(chosen, int(down.shape[0]))
    index = ops.cast(order, DType.int64)
    rows = ops.gather(x, index // int(count), axis=0)
    shares = ops.cast(ops.reshape(weights, [tokens * count, 1]), DType.float32)
    if weights_first:
        rows = ops.cast(ops.cast(rows, DType.float32) * ops.gather(shares, index, axis=0), x.dtype)

    def product(
        v: TensorValue,
        weight: TensorValue,
        bias: TensorValue | None,
        encoding: QuantizationEncoding | None,
    ) -> TensorValue:
        y = grouped_matmul_ragged(v, weight, starts, ids, stats, quantization_encoding=encoding)
        if bias is None:
            return y
        of_rows = ops.gather(chosen, index, axis=0)
        return y + ops.cast(ops.gather(bias, of_rows, axis=0), y.dtype)

    if isinstance(gate_up, tuple):
        biases: tuple[TensorValue | None, ...] = (None, None)
        if isinstance(gate_up_bias, tuple):
            biases = gate_up_bias
        elif gate_up_bias is not None:
            width = gate_up[0].shape[1]
            biases = gate_up_bias[:, :width], gate_up_bias[:, width:]
        encodings = (
            gate_up_encoding
            if isinstance(gate_up_encoding, tuple)
            else (gate_up_encoding, gate_up_encoding)
        )
        gate, up = (
            product(rows, weight, bias, encoding)
            for weight, bias, encoding in zip(gate_up, biases, encodings, strict=True)
        )
    else:
        if isinstance(gate_up_bias, tuple) or isinstance(gate_up_encoding, tuple):
            raise ValueError("run_experts: a pair of biases or encodings for one gate_up weight")
        both = product(rows, gate_up, gate_up_bias, gate_up_encoding)
        width = int(both.shape[1]) // 2
        gate, up = both[:, :width], both[:, width:]
    y = product(activation(gate, up), down, down_bias, down_encoding)
    y = ops.gather(y, ops.cast(restored, DType.int64), axis=0)
    wide = ops.cast(y, DType.float32)
    if not weights_first:
        wide = wide * shares
    total = ops.sum(ops.reshape(wide, [tokens, count, down.shape[1]]), axis=1)
    return ops.cast(ops.reshape(total, [tokens, down.shape[1]]), x.dtype)


class MoE(Module):
    """A mixture of gated MLPs (https://arxiv.org/abs/1701.06538), with experts that all tokens share where wanted.

    Shapes: the input and the result are ``[tokens, hidden_dim]``.

    Args:
        devices: The devices; the layer runs on the first one.
        hidden_dim: The size of the input's last dimension.
        num_experts: The number of experts.
        num_experts_per_token: The number of experts of a token.
        moe_dim: The size between the projections of an expert.
        gate_cls: The gate: called with devices, hidden_dim, num_experts, num_experts_per_token and dtype as keywords.
        has_shared_experts: Whether all tokens share an expert besides.
        shared_experts_dim: The size between its projections.
        ep_size: 1: experts are not spread over machines.
        dtype: The dtype of the weights; uint8 for encoded ones.
        apply_router_weight_first: Whether tokens are multiplied by their weights, and not results.
        ep_batch_manager: None.
        float8_config: How float8 weights are scaled; see `MoEFp8`.
        quantization_encoding: How the experts' weights are encoded in blocks.
        activation: From the results of gate and up projection to the input of the down projection.
        has_bias: Whether the experts' projections have biases.
        gate_dtype: The dtype of the gate's weight; by default `dtype`, or bfloat16 where that is no float of 16 bits or more.

    Raises:
        ValueError: No device, or the sizes do not fit.
        NotImplementedError: Experts are to be spread over machines.
    """

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
        activation: Activation = _swiglu,
        has_bias: bool = False,
        gate_dtype: DType | None = None,
    ) -> None:
        name = type(self).__name__
        if ep_size != 1 or ep_batch_manager is not None:
            raise NotImplementedError(
                f"{name}: ep_size {ep_size}; experts are not spread over machines. sharding_strategy tensor_parallel splits each expert"
            )
        if has_shared_experts and shared_experts_dim < 1:
            raise ValueError(f"{name}: shared experts with shared_experts_dim {shared_experts_dim}")
        if gate_dtype is None:
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
        self.activation = activation
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
        """The manager of experts that are spread over machines.

        Raises:
            ValueError: There is none.
        """
        raise ValueError(f"{type(self).__name__}: experts are not spread over machines")

    def _stacked(self, *names: str, part: str = "weight") -> TensorValue:
        """A part of all experts' projections, one after the other: ``[num_experts, …]``."""
        values: list[Weight] = [
            getattr(getattr(expert, name), part) for expert in self.experts for name in names
        ]
        if values[0].rank == 0:
            return ops.reshape(ops.stack(values), [self.num_experts, len(names)])
        rows = ops.concat(values, axis=0)
        count = int(values[0].shape[0]) * len(names)
        return ops.reshape(rows, [self.num_experts, count, *values[0].shape[1:]])

    @property
    def gate_up_proj(self) -> TensorValue:
        """The weights of gate and up projections, ``[num_experts, 2 * moe_dim, hidden_dim]``, in the graph."""
        return self._stacked("gate_proj", "up_proj")

    @property
    def down_proj(self) -> TensorValue:
        """The weights of the down projections, ``[num_experts, hidden_dim, moe_dim]``, in the graph."""
        return self._stacked("down_proj")

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer: ``tensor_parallel`` splits the inner features of each expert, whose results must be
        summed; ``replicate`` gives each device the whole layer.

        Raises:
            ValueError: It is set to another strategy.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        check_strategy(type(self).__name__, strategy, "tensor_parallel", "replicate")
        self._sharding = strategy
        whole = None if strategy is None else ShardingStrategy.replicate(strategy.num_devices)
        self.gate.sharding_strategy = whole
        for mlp in (*self.experts, *([self.shared_experts] if self.has_shared_experts else [])):
            mlp.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[MoE]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, it is for another number of devices, or the weights cannot be split
                so.
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
        """The weighted sum of the chosen experts' results, and those of the shared experts.

        Args:
            x: ``[tokens, hidden_dim]``.

        Raises:
            ValueError: The input has other sizes.
        """
        experts, weights = self.gate(x)
        y = self._run_experts(x, experts, weights)
        return y + self.shared_experts(x) if self.has_shared_experts else y

    def _run_experts(
        self, x: TensorValue, experts: TensorValue, weights: TensorValue
    ) -> TensorValue:
        gate_up, down = self._weights()
        biased = self.has_bias
        # the bias of a split layer is added by its first shard
        has_down_bias = biased and self.experts[0].down_proj.bias is not None
        return run_experts(
            x,
            experts,
            weights,
            gate_up,
            down,
            activation=self.activation,
            gate_up_bias=self._stacked("gate_proj", "up_proj", part="bias") if biased else None,
            down_bias=self._stacked("down_proj", part="bias") if has_down_bias else None,
            weights_first=self.apply_router_weight_first,
            gate_up_encoding=self.quantization_encoding,
            down_encoding=self.quantization_encoding,
        )

    def _weights(self) -> tuple[TensorValue, TensorValue]:
        """The weights of the grouped products."""
        return self.gate_up_proj, self.down_proj


class MoEFp8(MoE):
    """`MoE` with float8 weights, which are scaled when the model is loaded; inputs are not rounded to float8.

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
        return self._stacked("gate_proj", "up_proj", part="weight_scale")

    @property
    def down_proj_scales(self) -> TensorValue:
        """The scales of the down projections, ``[num_experts, row blocks, column blocks]``, in the graph."""
        return self._stacked("down_proj", part="weight_scale")

    def _weights(self) -> tuple[TensorValue, TensorValue]:
        config = self.float8_config
        assert config is not None
        blocks = config.weight_scale.block_size
        if config.weight_scale.is_colwise:
            raise ValueError("MoEFp8: scales of columns differ between gate and up projections")

        def scaled(
            what: str, weight: TensorValue, scales: TensorValue, matrices: int
        ) -> TensorValue:
            count, rows, columns = weight.shape
            # each matrix has blocks of its own
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
            scaled("MoEFp8.gate_up_proj", self.gate_up_proj, self.gate_up_proj_scales, 2),
            scaled("MoEFp8.down_proj", self.down_proj, self.down_proj_scales, 1),
        )
