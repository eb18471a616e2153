"""Logits: packed masks of allowed tokens, top-k with a count per row, filtered distributions."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, StaticDim, TensorValue, TensorValueLike, ops
from max.graph.ops.staging.stage import check_operand, stage_declared

__all__ = [
    "apply_packed_bitmask",
    "apply_packed_bitmask_with_penalties",
    "argmax_with_bias",
    "top_k_per_row",
    "topk_topp_masked_probs",
]

_BITS = 32


def _allowed_tokens(op: str, logits: TensorValue, packed: TensorValue) -> TensorValue:
    """Unpacks a bit mask of allowed tokens to bools of the shape of the logits."""
    if packed.dtype is not DType.int32:
        raise ValueError(f"{op}: packed is {packed!r}, expected int32")
    if logits.rank not in (2, 3) or not logits.dtype.is_float():
        raise ValueError(f"{op}: the logits are {logits!r}, expected floats of rank 2 or 3")
    vocab = logits.shape[-1]
    lead = list(logits.shape[:-1])
    words = (vocab + (_BITS - 1)) // _BITS
    static_sizes = isinstance(packed.shape[-1], StaticDim) and isinstance(words, StaticDim)
    if list(packed.shape[:-1]) != lead or (static_sizes and int(packed.shape[-1]) < int(words)):
        raise ValueError(
            f"{op}: packed is {packed!r}, expected [{', '.join(map(str, lead))}, {words} or more]"
        )
    if packed.shape[-1] != words:
        packed = packed[..., (slice(0, words), words)]
    # the word as an unsigned number
    wide = ops.cast(packed, DType.int64)
    wide = ops.where(wide < 0, wide + 2**_BITS, wide)
    powers = ops.constant(2 ** np.arange(_BITS, dtype=np.int64), DType.int64, packed.device)
    # [..., words, 32]: bit i of a word is token 32 * word + i
    bits = ops.floor_div(ops.unsqueeze(wide, -1), powers) % 2
    flat = ops.reshape(bits, [*lead, words * _BITS])
    if words * _BITS != vocab:
        flat = flat[..., (slice(0, vocab), vocab)]
    return ops.not_equal(flat, 0)


def apply_packed_bitmask(
    logits: TensorValueLike, packed: TensorValueLike, fill_val: float = -10000.0
) -> TensorValue:
    """Replaces the logits of tokens that a grammar forbids.

    Args:
        logits: ``[batch, vocab]`` or ``[batch, positions, vocab]``, floats.
        packed: int32 ``[…, ceil(vocab / 32)]``: bit ``i % 32`` (from the lowest) of word ``i // 32`` is 1 if token i is
            allowed. Words and bits past the vocabulary are ignored.
        fill_val: The logit of forbidden tokens.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    x = TensorValue(logits)
    allowed = _allowed_tokens("apply_packed_bitmask", x, TensorValue(packed))
    return ops.where(allowed, x, ops.constant(fill_val, x.dtype, x.device))


def apply_packed_bitmask_with_penalties(
    logits: TensorValueLike,
    packed: TensorValueLike,
    fill_val: float,
    frequency_data: TensorValueLike,
    frequency_offsets: TensorValueLike,
    frequency_penalty: TensorValueLike,
    presence_penalty: TensorValueLike,
) -> TensorValue:
    """`apply_packed_bitmask`, and penalties on the tokens that stay allowed.

    Args:
        logits: ``[batch, vocab]`` or ``[batch, positions, vocab]``, floats.
        packed: The allowed tokens; see `apply_packed_bitmask`.
        fill_val: The logit of forbidden tokens, which penalties do not change.
        frequency_data: int32 ``[n, 2]``: token and count; a negative token is skipped.
        frequency_offsets: uint32 ``[rows + 1]``: the first entry of `frequency_data` of each row of logits, whose
            leading axes are flattened.
        frequency_penalty: float32 ``[rows]``: subtracted once per occurrence.
        presence_penalty: float32 ``[rows]``: subtracted once from each token that occurred.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        ValueError: A shape or dtype does not fit.
        TypeError: The dtype of the data or of the offsets does not fit.
    """
    op = "apply_packed_bitmask_with_penalties"
    x, data, offsets = (TensorValue(v) for v in (logits, frequency_data, frequency_offsets))
    allowed = _allowed_tokens(op, x, TensorValue(packed))
    check_operand(op, "frequency_data", data, DType.int32, 2)
    rows = ops.reshape(x, [-1, x.shape[-1]])
    penalties = [TensorValue(v) for v in (frequency_penalty, presence_penalty)]
    for what, value in zip(("frequency_penalty", "presence_penalty"), penalties, strict=True):
        if value.shape[:1] != rows.shape[:1]:
            raise ValueError(f"{op}: {what} is {value!r}, expected [{rows.shape[0]}]")
    present = ops.greater_equal(data[:, 0], 0)
    none = ops.constant(0, DType.int32, data.device)
    lowered = stage_declared(
        "penalties",
        [
            ops.cast(rows, DType.float32),
            ops.where(present, data[:, 0], none),
            ops.where(present, data[:, 1], none),
            offsets,
            *penalties,
            # a repetition penalty of 1
            ops.broadcast_to(ops.constant(1.0, DType.float32, x.device), [rows.shape[0]]),
        ],
    )[0]
    lowered = ops.reshape(ops.cast(lowered, x.dtype), x.shape)
    return ops.where(allowed, lowered, ops.constant(fill_val, x.dtype, x.device))


def argmax_with_bias(logits: TensorValue, bias: TensorValue, *, position: int) -> TensorValue:
    """The argmax of ``logits[:, position] + bias``, computed in float32.

    Args:
        logits: ``[rows, positions, vocab_size]``.
        bias: ``[rows, vocab_size]``.
        position: The position, counted from 0.

    Returns:
        int64 ``[rows]``; the first index of equal sums.

    Raises:
        ValueError: A shape does not fit, or the position is out of range.
    """
    op = "argmax_with_bias"
    if logits.rank != 3 or list(bias.shape) != [logits.shape[0], logits.shape[-1]]:
        raise ValueError(
            f"{op}: logits {logits!r} and bias {bias!r}, expected [rows, positions, vocab_size] and "
            "[rows, vocab_size]"
        )
    count = logits.shape[1]
    if position < 0 or (isinstance(count, StaticDim) and position >= int(count)):
        raise ValueError(f"{op}: position {position} is not one of the {count} positions")
    total = ops.cast(logits[:, position], DType.float32) + ops.cast(bias, DType.float32)
    return ops.reshape(ops.argmax(total, axis=-1), [logits.shape[0]])


def _numbers(count: int, device: DeviceRef) -> TensorValue:
    return ops.constant(np.arange(count, dtype=np.int64), DType.int64, device)


def top_k_per_row(
    input: TensorValue, k: TensorValue, max_k: int
) -> tuple[TensorValue, TensorValue]:
    """The k greatest elements of each row, with k given per row.

    Args:
        input: ``[rows, n]``, without NaN.
        k: int64 ``[rows]``: the number of elements of each row, 0 or more; clamped to `max_k`.
        max_k: The width of the results, up to n.

    Returns:
        ``[rows, max_k]`` elements, the greatest first, and their column indices, int64. Positions past the k of a row
        hold the lowest value of the dtype and the index -1.

    Raises:
        ValueError: A shape or dtype does not fit, or `max_k` is not a number from 0 to n.
    """
    op = "top_k_per_row"
    if input.rank != 2 or not isinstance(input.shape[1], StaticDim):
        raise ValueError(f"{op}: the input is {input!r}, expected [rows, a number]")
    size = int(input.shape[1])
    if k.dtype is not DType.int64 or list(k.shape) != [input.shape[0]]:
        raise ValueError(f"{op}: k is {k!r}, expected int64 [{input.shape[0]}]")
    if not 0 <= max_k <= size:
        raise ValueError(f"{op}: max_k is {max_k}, expected 0 to {size}")
    if not max_k:
        nothing = input[:, 0:0]
        return nothing, ops.cast(nothing, DType.int64)
    values, columns = ops.top_k(input, max_k)
    chosen = ops.greater(ops.unsqueeze(k, 1), _numbers(max_k, input.device))
    kind = input.dtype
    lowest = -np.inf if kind.is_float() else np.iinfo(kind.to_numpy()).min
    none = ops.constant(-1, DType.int64, input.device)
    return (
        ops.where(chosen, values, ops.constant(lowest, kind, input.device)),
        ops.where(chosen, columns, none),
    )


def topk_topp_masked_probs(
    logits: TensorValue, *, top_k: TensorValue, temperature: TensorValue, top_p: TensorValue
) -> TensorValue:
    """The probabilities from which a token is sampled: softmax of each row, then top-k, then top-p.

    A token is kept if its probability is at least that of the last token within both limits, so ties are all kept.

    Args:
        logits: ``[rows, vocab_size]`` with a static `vocab_size`; cast to float32.
        top_k: int64 ``[rows]``: the number of tokens to keep; -1: all.
        temperature: float32 ``[rows]``: the divisor of the logits; 0: the tokens with the greatest logit share the
            probability equally.
        top_p: float32 ``[rows]``: the most probable tokens are kept until their probabilities sum to this value; at
            least one is kept.

    Returns:
        float32 ``[rows, vocab_size]``: the probabilities of the kept tokens, which sum to 1, and 0 for the others.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "topk_topp_masked_probs"
    if logits.rank != 2 or not isinstance(logits.shape[1], StaticDim):
        raise ValueError(f"{op}: the logits are {logits!r}, expected [rows, a number]")
    for what, value, dtype in (
        ("top_k", top_k, DType.int64), ("temperature", temperature, DType.float32), ("top_p", top_p, DType.float32),
    ):  # fmt: skip
        check_operand(op, what, value, dtype, 1)
        if value.shape[0] != logits.shape[0]:
            raise ValueError(f"{op}: {what} is {value!r}, expected [{logits.shape[0]}]")
    size = int(logits.shape[1])
    k, divisor, p = (ops.unsqueeze(value, 1) for value in (top_k, temperature, top_p))
    wide = ops.cast(logits, DType.float32)
    below = wide - ops.max(wide, axis=-1)  # [rows, vocab], at most 0
    greedy = ops.logical_not(divisor > 0)
    one = ops.constant(1.0, DType.float32, logits.device)
    scaled = ops.exp(below / ops.where(greedy, one, divisor))
    parts = ops.where(greedy, ops.cast(ops.equal(below, 0.0), DType.float32), scaled)
    probabilities = parts / ops.sum(parts, axis=-1)
    ranked, _ = ops.top_k(probabilities, size)
    number = _numbers(size, logits.device)
    count = ops.where(k < 0, ops.constant(size, DType.int64, logits.device), k)
    # top-p applies to the distribution renormalized after top-k
    left = ops.where(
        ops.greater(count, number), ranked, ops.constant(0.0, DType.float32, logits.device)
    )
    left = left / ops.sum(left, axis=-1)
    before = ops.cumsum(left, axis=-1) - left  # the probability of likelier tokens
    # the likeliest token stays, whatever top_p is
    kept = ops.logical_and(left > 0, ops.logical_or(ops.greater(p, before), ops.equal(number, 0)))
    cutoff = ops.min(
        ops.where(kept, ranked, ops.constant(np.inf, DType.float32, logits.device)), axis=-1
    )
    masked = ops.where(
        ops.greater_equal(probabilities, cutoff),
        probabilities,
        ops.constant(0.0, DType.float32, logits.device),
    )
    return masked / ops.sum(masked, axis=-1)
