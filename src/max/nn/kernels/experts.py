"""Mixtures of experts: the choice of experts, rows sorted by expert, products of groups of rows."""

from __future__ import annotations

from typing import Literal

from max.dtype import DType
from max.graph import DeviceRef, StaticDim, TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.graph.quantization import QuantizationEncoding
from max.nn.float8_config import Float8InputScaleSpec, Float8WeightScaleSpec
from max.nn.kernels.float8 import scaled_rows, scaled_weights
from max.nn.kernels.products import matmul_input

__all__ = [
    "grouped_dynamic_scaled_fp8_matmul",
    "grouped_matmul_ragged",
    "moe_create_indices",
    "moe_finalize",
    "moe_router_group_limited",
    "of_best_groups",
]


def of_best_groups(
    choice: TensorValue, groups: int, best_groups: int, score: Literal["greatest", "two_greatest"]
) -> TensorValue:
    """Masks the scores of experts outside the best groups with -inf.

    Args:
        choice: The scores, ``[tokens, experts]``.
        groups: The number of groups of consecutive experts, a divisor of the number of experts.
        best_groups: The number of best groups to keep.
        score: A group's score: the greatest score in it, or the sum of the two greatest.
    """
    # experts of a group are neighbors: [tokens, experts] as [tokens, groups, in_group]
    tokens, in_group = choice.shape[0], int(choice.shape[1]) // groups
    grouped = ops.reshape(choice, [tokens, groups, in_group])
    if score == "greatest":
        group_scores = ops.max(grouped, axis=-1)
    else:
        # one good expert in a weak group is not enough (DeepSeek V3)
        two, _ = ops.top_k(grouped, min(2, in_group))
        group_scores = ops.sum(two, axis=-1)
    _, best = ops.top_k(ops.reshape(group_scores, [tokens, groups]), best_groups)
    numbers = ops.range(0, groups, 1, out_dim=groups, dtype=DType.int64, device=choice.device)
    # [tokens, chosen, groups]: the groups that are among the best
    among = ops.equal(ops.unsqueeze(best, -1), ops.reshape(numbers, [1, 1, groups]))
    among = ops.max(ops.cast(among, DType.int32), axis=1)
    seen = ops.greater(ops.reshape(among, [tokens, groups, 1]), 0)
    # a later top-k never takes -inf: the best groups hold enough experts
    hidden = ops.constant(float("-inf"), choice.dtype, choice.device)
    return ops.reshape(ops.where(seen, grouped, hidden), choice.shape)


def moe_router_group_limited(
    expert_scores: TensorValue,
    expert_bias: TensorValue,
    n_routed_experts: int,
    n_experts_per_tok: int,
    n_groups: int,
    topk_group: int,
    norm_weights: bool,
    routed_scaling_factor: float,
) -> tuple[TensorValue, TensorValue]:
    """Chooses the experts of each token among the best groups (DeepSeek-V3, https://arxiv.org/abs/2412.19437).

    Experts are ranked by ``score + bias``. The score of a group is the sum of the two greatest such values in it. The
    best experts of the best groups are chosen; their weights are their scores without the bias.

    Args:
        expert_scores: ``[tokens, n_routed_experts]``, floats.
        expert_bias: ``[n_routed_experts]``, added for the choice only.
        n_routed_experts: The number of experts.
        n_experts_per_tok: The number of experts chosen for each token.
        n_groups: The number of groups of consecutive experts.
        topk_group: The number of groups to choose from; unused if there is one group.
        norm_weights: Whether weights are divided by their sum; always so if there is one group.
        routed_scaling_factor: The factor by which the final weights are multiplied.

    Returns:
        The experts, the best first, int32 ``[tokens, n_experts_per_tok]``, and their weights, of the scores' dtype.

    Raises:
        ValueError: A shape does not fit, or the numbers are inconsistent.
    """
    op = "moe_router_group_limited"
    expected = [n_routed_experts]
    if expert_scores.rank != 2 or expert_scores.shape[1] != n_routed_experts:
        raise ValueError(
            f"{op}: expert_scores is {expert_scores!r}, expected [tokens, {n_routed_experts}]"
        )
    if not expert_scores.dtype.is_float() or list(expert_bias.shape) != expected:
        raise ValueError(
            f"{op}: expert_scores {expert_scores!r} and expert_bias {expert_bias!r}; expected floats and {expected}"
        )
    assert isinstance(expert_scores.shape[1], StaticDim)
    chosen = 1 if n_groups == 1 else topk_group
    if n_groups < 1 or n_routed_experts % n_groups or not 0 < chosen <= n_groups:
        raise ValueError(f"{op}: {chosen} of {n_groups} groups of {n_routed_experts} experts")
    available = chosen * (n_routed_experts // n_groups)
    if not 0 < n_experts_per_tok <= available:
        raise ValueError(f"{op}: {n_experts_per_tok} of {available} experts for a token")
    scores = ops.cast(expert_scores, DType.float32)
    choice = scores + ops.cast(expert_bias, DType.float32)
    if n_groups > 1:
        choice = of_best_groups(choice, n_groups, chosen, "two_greatest")
    _, experts = ops.top_k(choice, n_experts_per_tok)
    # of the scores: the bias balances the load, and is for the choice only
    weights = ops.gather_nd(scores, ops.unsqueeze(experts, -1), batch_dims=1)
    if norm_weights or n_groups == 1:
        # all sigmoid scores may be 0: avoid a division by 0
        weights = weights / (ops.sum(weights, axis=-1) + 1e-20)
    weights = weights * routed_scaling_factor
    return ops.cast(experts, DType.int32), ops.cast(weights, expert_scores.dtype)


def moe_create_indices(
    topk_ids: TensorValue, num_local_experts: int
) -> tuple[TensorValue, TensorValue, TensorValue, TensorValue, TensorValue]:
    """Sorts rows by expert; the sort is stable.

    Args:
        topk_ids: The expert of each row, integers ``[rows]``.
        num_local_experts: The number of experts.

    Returns:
        ``(token_expert_order, expert_start_indices, restore_token_order, expert_ids, expert_usage_stats)``:

        - uint32 ``[rows]``: the row indices sorted by expert, one group per expert;
        - uint32 ``[num_local_experts + 1]``: the first sorted row of each group; the elements past the last group are
          `rows`;
        - uint32 ``[rows]``: the position of each row in the sorted order;
        - int32 ``[num_local_experts]``: the expert of each group, padded with -1; experts without rows have no group;
        - uint32 ``[2]``, on the CPU: the maximum number of rows in a group, and the number of groups.

    Raises:
        ValueError: The ids have another rank, or there is no expert. An id out of range raises when the graph runs.
        TypeError: The ids are not integers.
    """
    order, starts, restored, experts, stats = stage_declared(
        "moe.indices", [topk_ids], {"experts": num_local_experts}
    )
    return order, starts, restored, experts, stats.to(DeviceRef.CPU())


def grouped_matmul_ragged(
    hidden_states: TensorValue,
    weight: TensorValue,
    expert_start_indices: TensorValue,
    expert_ids: TensorValue,
    expert_usage_stats_host: TensorValue,
    *,
    quantization_encoding: QuantizationEncoding | None = None,
) -> TensorValue:
    """Multiplies each group of rows by the weight of its expert: ``x @ weight[expert].T``.

    Weights of experts without rows are not read. Sums are accumulated in float32. If the weights have 16 bits, float32
    rows are rounded to the dtype of the weights.

    Args:
        hidden_states: ``[rows, in_dim]``, sorted by group.
        weight: ``[experts, out_dim, in_dim]``, or rows of encoded blocks ``[experts, out_dim, bytes]``.
        expert_start_indices: The first row of each group, then the end of the last group.
        expert_ids: The expert of each group; -1: the group's results are 0.
        expert_usage_stats_host: uint32 ``[2]``, on the CPU: the maximum number of rows in a group, and the number of
            groups.
        quantization_encoding: The encoding of the weight; None: not encoded.

    Returns:
        ``[rows, out_dim]``, of the rows' dtype. Rows past the last group are 0.

    Raises:
        ValueError: A shape does not fit. Invalid groups and experts raise when the graph runs.
    """
    groups = [expert_start_indices, expert_ids, expert_usage_stats_host]
    shape = [*hidden_states.shape[:1], *weight.shape[1:2]]
    result = TensorType(hidden_states.dtype, shape, hidden_states.device)
    if quantization_encoding is None:
        rows = matmul_input(hidden_states, weight)
        name, attrs = "grouped_matmul.ragged", {}
    else:
        rows = hidden_states
        name, attrs = "grouped_qmatmul.ragged", {"encoding": quantization_encoding.value}
    return stage_declared(name, [rows, weight, *groups], attrs, [result])[0]


def grouped_dynamic_scaled_fp8_matmul(
    hidden_states: TensorValue,
    weight: TensorValue,
    a_scales: TensorValue,
    b_scales: TensorValue,
    expert_start_indices: TensorValue,
    expert_ids: TensorValue,
    expert_usage_stats_host: TensorValue,
    input_scale_spec: Float8InputScaleSpec,
    weight_scale_spec: Float8WeightScaleSpec,
    out_type: DType = DType.bfloat16,
) -> TensorValue:
    """`grouped_matmul_ragged` of scaled float8 operands, which are scaled in float32 before they are multiplied.

    Args:
        hidden_states: float8 ``[rows, in_dim]``, sorted by group.
        weight: float8 ``[experts, out_dim, in_dim]``.
        a_scales: ``[groups, rows]``: each row is divided into `groups` equal runs of columns, which share a scale.
        b_scales: ``[experts, row blocks, column blocks]``.
        expert_start_indices: The first row of each group, then the end of the last group.
        expert_ids: The expert of each group; -1: the group's results are 0.
        expert_usage_stats_host: uint32 ``[2]``, on the CPU: the maximum number of rows in a group, and the number of
            groups.
        input_scale_spec: How the rows are scaled.
        weight_scale_spec: How the weight is scaled.
        out_type: The dtype of the result.

    Returns:
        ``[rows, out_dim]``.

    Raises:
        ValueError: A shape does not fit.
        TypeError: An operand is not a float8 tensor.
    """
    op = "grouped_dynamic_scaled_fp8_matmul"
    if hidden_states.rank != 2 or weight.rank != 3:
        raise ValueError(
            f"{op}: {hidden_states!r} and {weight!r}, expected [rows, in_dim] and [experts, out_dim, in_dim]"
        )
    x = scaled_rows(op, hidden_states, a_scales)
    w = scaled_weights(op, weight, b_scales, weight_scale_spec.block_size)
    product = grouped_matmul_ragged(x, w, expert_start_indices, expert_ids, expert_usage_stats_host)
    return ops.cast(product, out_type)


def moe_finalize(
    down_projs: TensorValue,
    restore_token_order: TensorValue,
    router_weight: TensorValue,
    out_type: DType,
) -> TensorValue:
    """The weighted sum of the outputs of each token's experts; computed in float32.

    Args:
        down_projs: The outputs, sorted by expert: ``[tokens * experts_per_token, hidden]``.
        restore_token_order: The row of each token's experts in `down_projs`, uint32 ``[tokens * experts_per_token]``;
            see `moe_create_indices`.
        router_weight: ``[tokens, experts_per_token]``.
        out_type: The dtype of the result.

    Returns:
        ``[tokens, hidden]``.

    Raises:
        ValueError: A shape does not fit. A row index out of range raises when the graph runs.
        TypeError: `restore_token_order` is not uint32.
    """
    op = "moe_finalize"
    if restore_token_order.dtype is not DType.uint32:
        raise TypeError(f"{op}: restore_token_order is {restore_token_order!r}, expected uint32")
    if down_projs.rank != 2 or restore_token_order.rank != 1 or router_weight.rank != 2:
        raise ValueError(
            f"{op}: down_projs {down_projs!r}, restore_token_order {restore_token_order!r} and router_weight "
            f"{router_weight!r}; expected [rows, hidden], [rows] and [tokens, experts_per_token]"
        )
    tokens, count = router_weight.shape
    order = ops.rebind(
        restore_token_order, [tokens * count], f"{op}: each token has {count} rows of experts"
    )
    # rows are sorted by expert; `order` brings the `count` rows of a token together
    rows = ops.gather(down_projs, ops.cast(order, DType.int64), axis=0)
    # in float32, as a sum of several experts would be rounded at each step
    wide = ops.cast(ops.reshape(rows, [tokens, count, down_projs.shape[1]]), DType.float32)
    weighted = wide * ops.unsqueeze(ops.cast(router_weight, DType.float32), -1)
    return ops.cast(ops.squeeze(ops.sum(weighted, axis=1), 1), out_type)
