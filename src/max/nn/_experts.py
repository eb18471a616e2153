"""The library ops of mixtures of experts: rows sorted by expert, and products of groups of rows."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, ops
from max.graph.ops._stage import stage_declared
from max.graph.quantization import QuantizationEncoding
from max.nn._projection import matmul_input
from max.nn._scaled import scaled_rows, scaled_weights
from max.nn.float8_config import Float8InputScaleSpec, Float8WeightScaleSpec

__all__ = ["grouped_dynamic_scaled_fp8_matmul", "grouped_matmul_ragged", "moe_create_indices"]


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
    if hidden_states.rank != 2 or weight.rank != 3:
        raise ValueError(
            f"grouped_matmul_ragged: {hidden_states!r} and {weight!r}, expected [rows, in_dim] and "
            "[experts, out_dim, in_dim]"
        )
    groups = [expert_start_indices, expert_ids, expert_usage_stats_host]
    shape = [hidden_states.shape[0], weight.shape[1]]
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
