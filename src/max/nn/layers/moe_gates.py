"""Gates of mixtures of experts: they choose the experts of each token and the router weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.nn.kernels.experts import of_best_groups
from max.nn.kernels.products import project
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.nn.layers.sharding import check_strategy, part_of, shard_devices

__all__ = ["ExpertRouting", "MoEGate", "RoutedMoEGate", "SigmoidTopKRouter"]


class MoEGate(Module):
    """Chooses the experts with the greatest scores of a linear layer; the scores are the router weights.

    Args:
        devices: The devices; the gate runs on the first one.
        hidden_dim: The size of the input's last dimension.
        num_experts: The number of experts.
        num_experts_per_token: The number of experts chosen for each token.
        dtype: The dtype of the weight.

    Raises:
        ValueError: There is no device, or the numbers do not fit.
    """

    __module__ = "max.nn.moe"

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
            ValueError: There is no sharding strategy, or its number of devices differs.
        """
        where = shard_devices("MoEGate", self.sharding_strategy, devices)
        return [
            part_of(self, type(self), gate_score=score, devices=[device])
            for score, device in zip(self.gate_score.shard(where), where, strict=True)
        ]

    def __call__(self, hidden_state: TensorValue) -> tuple[TensorValue, TensorValue]:
        """Chooses the experts of each token.

        Args:
            hidden_state: ``[tokens, hidden_dim]``.

        Returns:
            The experts, int64 ``[tokens, num_experts_per_token]``, and their scores of the same shape, the greatest
            first.
        """
        scores = self.gate_score(hidden_state)
        weights, experts = ops.top_k(scores, self.num_experts_per_token)
        return experts, weights


@dataclass(frozen=True)
class ExpertRouting:
    """How a gate computes scores, chooses experts and computes their weights.

    Args:
        scoring: The function of a token's logits: softmax over all experts, softmax over the chosen ones, sigmoid, or
            sparsemixer (https://arxiv.org/abs/2409.12136), which chooses two experts; the weight of each is its softmax
            over the logits near its own, without the expert chosen before it.
        normalized: Whether the weights of a token are divided by their sum.
        scale: The factor by which the final weights are multiplied.
        groups: The number of groups of consecutive experts; only experts of the best groups can be chosen.
        chosen_groups: The number of these best groups.
        group_score: A group's score: the greatest score in it, or the sum of the two greatest.
        has_correction: Whether the weight ``e_score_correction_bias`` is added to the scores for the choice only, not
            for the weights.
        in_float32: Whether a gate with 16-bit weights computes its logits in float32, without rounding them to 16 bits.
        least_sum: The lower bound of the divisor of normalized weights.
        sum_offset: Added to the divisor of normalized weights.
        jitter: For sparsemixer: logits whose distance from the chosen one, relative to their magnitude, exceeds twice
            this value are masked.
    """

    scoring: Literal["softmax", "softmax_of_chosen", "sigmoid", "sparsemixer"] = "softmax"
    normalized: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["greatest", "two_greatest"] = "greatest"
    has_correction: bool = False
    in_float32: bool = False
    least_sum: float = 0.0
    sum_offset: float = 0.0
    jitter: float = 0.01


class RoutedMoEGate(MoEGate):
    """A gate with configurable routing, as in Mixtral, OLMoE, Qwen, GPT-OSS, DeepSeek and others.

    Scores are computed in float32. Pass ``functools.partial(RoutedMoEGate, routing=…)`` as `gate_cls` of `MoE`.

    Args:
        devices: The devices; the gate runs on the first one.
        hidden_dim: The size of the input's last dimension.
        num_experts: The number of experts.
        num_experts_per_token: The number of experts chosen for each token.
        dtype: The dtype of the weight.
        routing: How a gate computes scores, chooses experts and computes their weights.
        has_bias: Whether the linear layer has a bias.

    Raises:
        ValueError: The groups do not divide the experts, or the chosen groups have too few experts.
    """

    __module__ = "max.nn.moe"

    e_score_correction_bias: Weight | None
    """float32 ``[num_experts]``, added to the scores for the choice."""

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
        # the chosen groups must hold as many experts as a token gets
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
        """Chooses the experts of each token.

        Args:
            hidden_state: ``[tokens, hidden_dim]``.

        Returns:
            The experts, int64 ``[tokens, num_experts_per_token]``, and their weights, float32 of the same shape.
        """
        routing = self.routing
        if routing.in_float32:
            weight = ops.cast(self.gate_score.weight, DType.float32)
            wide = ops.cast(hidden_state, DType.float32)
            logits = self.gate_score.with_terms(wide, project(wide, weight))
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
            choice = of_best_groups(
                choice, routing.groups, routing.chosen_groups, routing.group_score
            )
        _, experts = ops.top_k(choice, self.num_experts_per_token)
        # of the scores: the correction and the groups are for the choice only
        weights = ops.gather_nd(scores, ops.unsqueeze(experts, -1), batch_dims=1)
        if routing.scoring == "softmax_of_chosen":
            # over the chosen logits only: the others have no share
            weights = ops.softmax(weights)
        if routing.normalized:
            total = ops.sum(weights, axis=-1)
            if routing.least_sum:
                total = ops.max(total, routing.least_sum)
            # all sigmoids may be 0: avoid a division by 0
            offset = routing.sum_offset or (1e-20 if routing.scoring == "sigmoid" else 0.0)
            weights = weights / (total + offset if offset else total)
        return experts, weights if routing.scale == 1.0 else weights * routing.scale

    def _sparsemixer(self, logits: TensorValue) -> tuple[TensorValue, TensorValue]:
        """The two experts with the greatest logits, and their weights by sparsemixer."""
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
            # [tokens, 1]: the first choice, then the second one
            # as in the paper: the distance is relative to max(|logit|, chosen logit)
            distance = (chosen - logits) / ops.max(ops.abs(logits), chosen)
            far = ops.greater(distance, 2 * self.routing.jitter)
            shares = ops.where(far, zero, ops.exp(ops.min(logits - chosen, zero)))
            if place:
                # the second expert is drawn from those that are left
                shares = ops.where(is_first, zero, shares)
            # the softmax of the chosen logit, whose own share is exp(0)
            weights.append(1.0 / ops.sum(shares, axis=-1))
        weight = ops.concat(weights, axis=-1)
        return experts, weight if self.routing.scale == 1.0 else weight * self.routing.scale


class SigmoidTopKRouter(RoutedMoEGate):
    """A gate with sigmoid scores and a bias for the choice, as in DeepSeek-V3 with one group.

    Args:
        devices: The devices; the gate runs on the first one.
        hidden_dim: The size of the input's last dimension.
        num_experts: The number of experts.
        num_experts_per_token: The number of experts chosen for each token.
        dtype: The dtype of the weight.
        norm_topk_prob: Whether the weights of a token are divided by their sum.
        gate_dtype: The dtype of the weight; by default `dtype`.
        correction_bias_dtype: The dtype of the bias, which must be float32.
        routed_scaling_factor: The factor by which the final weights are multiplied.

    Raises:
        ValueError: There is no device, or the numbers do not fit.
        TypeError: `correction_bias_dtype` is not float32.
    """

    __module__ = "max.nn.moe"

    def __init__(
        self,
        devices: list[DeviceRef],
        hidden_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        dtype: DType,
        norm_topk_prob: bool = True,
        gate_dtype: DType | None = None,
        correction_bias_dtype: DType = DType.float32,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        if correction_bias_dtype is not DType.float32:
            raise TypeError(
                f"SigmoidTopKRouter: correction_bias_dtype is {correction_bias_dtype.name}, expected float32"
            )
        routing = ExpertRouting(
            "sigmoid", norm_topk_prob, routed_scaling_factor, has_correction=True
        )
        super().__init__(
            devices, hidden_dim, num_experts, num_experts_per_token, gate_dtype or dtype, routing
        )  # fmt: skip

    def __call__(self, hidden_state: TensorValue) -> tuple[TensorValue, TensorValue]:
        """Chooses the experts of each token.

        Args:
            hidden_state: ``[tokens, hidden_dim]``.

        Returns:
            The experts, int32 ``[tokens, num_experts_per_token]``, and their weights, float32 of the same shape.
        """
        experts, weights = super().__call__(hidden_state)
        return ops.cast(experts, DType.int32), weights
