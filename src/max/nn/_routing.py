"""The ops of later versions for expert routing: the choice of experts, and the sum of their outputs."""

from __future__ import annotations

from max.dtype import DType
from max.graph import StaticDim, TensorValue, ops
from max.nn._moe_gates import of_best_groups

__all__ = ["moe_finalize", "moe_router_group_limited"]


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
    rows = ops.gather(down_projs, ops.cast(order, DType.int64), axis=0)
    wide = ops.cast(ops.reshape(rows, [tokens, count, down_projs.shape[1]]), DType.float32)
    weighted = wide * ops.unsqueeze(ops.cast(router_weight, DType.float32), -1)
    return ops.cast(ops.squeeze(ops.sum(weighted, axis=1), 1), out_type)


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
    weights = ops.gather_nd(scores, ops.unsqueeze(experts, -1), batch_dims=1)
    if norm_weights or n_groups == 1:
        # all sigmoid scores may be 0: avoid a division by 0
        weights = weights / (ops.sum(weights, axis=-1) + 1e-20)
    weights = weights * routed_scaling_factor
    return ops.cast(experts, DType.int32), ops.cast(weights, expert_scores.dtype)
