"""Attention with and without caches, and rotary embeddings, as exporters of transformers write them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.onnx.table import op

_MS = "com.microsoft"


def split_heads(x: TensorValue, heads: int) -> TensorValue:
    """``[batch, length, heads * size]`` as ``[batch, heads, length, size]``."""
    if x.rank == 4:
        return x
    batch, length, width = x.shape
    exact = width.expr.exact_quotient(heads)
    if exact is None:
        raise Unsupported(f"has {heads} heads for a width of {width}")
    return ops.permute(ops.reshape(x, [batch, length, heads, Dim.from_mlir(exact)]), [0, 2, 1, 3])


def joined_heads(x: TensorValue) -> TensorValue:
    """The inverse of `split_heads`."""
    batch, heads, length, size = x.shape
    return ops.reshape(ops.permute(x, [0, 2, 1, 3]), [batch, length, heads * size])


def attend(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    scale: float,
    bias: TensorValue | None,
    softcap: float = 0.0,
) -> TensorValue:
    """Attention over ``[batch, heads, length, size]``; `bias` is added to the scaled scores."""
    scores = ops.matmul(q * scale, ops.transpose(k, 2, 3))  # [batch, heads, queries, keys]
    if softcap:
        scores = ops.tanh(scores * (1 / softcap)) * softcap
    if bias is not None:
        scores = scores + ops.cast(bias, scores.dtype)
    return ops.matmul(ops.softmax(scores), v)


def mask_bias(is_allowed: TensorValue, dtype: DType, value: float) -> TensorValue:
    """A bias that is 0 where a mask is true, and a large negative number elsewhere."""
    zero = ops.constant(np.zeros((), dtype.to_numpy()))
    return ops.where(is_allowed, zero, ops.constant(np.array(value, dtype.to_numpy())))


def _places(count: Any, x: TensorValue, axis: int) -> TensorValue:
    # along one of the four axes of scores, 1 along the others
    line = ops.range(0, count, 1, dtype=DType.int64, device=x.device)
    return ops.reshape(line, [count if i == axis else Dim(1) for i in range(4)])


def causal(queries: Dim, keys: Dim, x: TensorValue) -> TensorValue:
    """Whether a query may see a key: the last query sees all keys."""
    return _places(keys, x, 3) <= _places(queries, x, 2) + (
        TensorValue(keys) - TensorValue(queries)
    )


def _mask_bias(
    node: Node, mask: TensorValue, q: TensorValue, keys: Dim, filter_: float
) -> TensorValue:
    """The bias of a mask of lengths ``[batch]``, of keys ``[batch, keys]``, or of all pairs."""
    if mask.rank == 1:
        # [batch] lengths: the keys before the end of a sequence
        allowed = _places(keys, q, 3) < ops.reshape(
            ops.cast(mask, DType.int64), [mask.shape[0], 1, 1, 1]
        )
        return mask_bias(allowed, q.dtype, filter_)
    if mask.rank == 2:
        # the same keys for all heads and queries
        mask = ops.reshape(mask, [mask.shape[0], 1, 1, mask.shape[1]])
    elif mask.rank == 3:
        # [batch, queries, keys], the same for all heads
        mask = ops.unsqueeze(mask, 1)
    return mask_bias(ops.not_equal(mask, 0), q.dtype, filter_)


@op(f"{_MS}:Attention")
def attention(node: Node) -> Any:
    x, weight = node.tensor(0), node.tensor(1)
    heads = node.attr("num_heads")
    qkv = ops.matmul(x, weight)  # [batch, length, sizes of q, k and v]
    if node.has(2):
        qkv = qkv + node.tensor(2)
    sizes = node.attr("qkv_hidden_sizes") or [node.static(weight.shape[1], 1) // 3] * 3
    q, k, v = (split_heads(part, heads) for part in ops.split(qkv, sizes, 2))
    present: TensorValue | None = None
    if node.has(4):
        past = node.tensor(4)  # [2, batch, heads, length, size]: keys, then values
        k = ops.concat([ops.reshape(past[0], past.shape[1:]), k], 2)
        v = ops.concat([ops.reshape(past[1], past.shape[1:]), v], 2)
    if node.wants(1):
        present = ops.stack([k, v], 0)
    return joined_heads(_with_masks(node, q, k, v, 3, 5)), present


def _with_masks(
    node: Node, q: TensorValue, k: TensorValue, v: TensorValue, mask: int, bias: int
) -> TensorValue:
    filter_ = node.attr("mask_filter_value", -10000.0)
    keys = k.shape[2]
    total: TensorValue | None = None
    if node.has(mask):
        total = _mask_bias(node, node.tensor(mask), q, keys, filter_)
    if node.has(bias):
        total = node.tensor(bias) if total is None else total + node.tensor(bias)
    if node.attr("unidirectional", 0):
        # the attribute's value is for masks of the model; keys that come later are never seen
        own = mask_bias(causal(q.shape[2], keys, q), q.dtype, -math.inf)
        total = own if total is None else total + own
    scale = node.attr("scale", 0.0) or 1 / math.sqrt(node.static(q.shape[3]))
    return attend(q, k, v, scale, total)


@op(f"{_MS}:MultiHeadAttention")
def multi_head_attention(node: Node) -> Any:
    heads = node.attr("num_heads")
    query = node.tensor(0)
    if query.rank == 5:
        # [batch, length, heads, 3, size] to [3, batch, heads, length, size]
        packed = ops.permute(query, [3, 0, 2, 1, 4])
        q, k, v = (ops.reshape(packed[i], packed.shape[1:]) for i in range(3))
    elif node.has(1) and node.tensor(1).rank == 5:
        # [batch, length, heads, 2, size]: keys and values
        packed = ops.permute(node.tensor(1), [3, 0, 2, 1, 4])
        q = split_heads(query, heads)
        k, v = (ops.reshape(packed[i], packed.shape[1:]) for i in range(2))
    else:
        parts = [query, node.tensor(1), node.tensor(2)]
        if node.has(3):
            # one bias for the three, side by side; a cross attention's keys are projected already
            bias, start = node.tensor(3), 0
            for index, part in enumerate(parts):
                if part.rank == 3:
                    width = node.static(part.shape[2], index)
                    parts[index] = part + bias[start : start + width]
                    start += width
        q, k, v = (split_heads(part, heads) for part in parts)
    if node.has(6):
        k, v = ops.concat([node.tensor(6), k], 2), ops.concat([node.tensor(7), v], 2)
    return joined_heads(_with_masks(node, q, k, v, 4, 5)), k, v


def rotate_pairs(
    x: TensorValue, cosines: TensorValue, sines: TensorValue, interleaved: bool
) -> TensorValue:
    """Rotates the pairs of the first elements of the last axis; cosines and sines have half their number."""
    half = int(cosines.shape[-1])
    width = 2 * half
    rest = x[..., width:]
    turned = x[..., :width]
    if interleaved:
        # elements 2i and 2i + 1 are a pair; else i and i + half
        pairs = ops.reshape(turned, [*x.shape[:-1], half, 2])
        first, second = (ops.reshape(pairs[..., i : i + 1], [*x.shape[:-1], half]) for i in (0, 1))
    else:
        first, second = turned[..., :half], turned[..., half:]
    real, imaginary = first * cosines - second * sines, first * sines + second * cosines
    if interleaved:
        both = ops.concat([ops.unsqueeze(real, -1), ops.unsqueeze(imaginary, -1)], -1)
        result = ops.reshape(both, [*x.shape[:-1], width])
    else:
        result = ops.concat([real, imaginary], -1)
    return result if x.shape[-1] == width else ops.concat([result, rest], -1)


@op(f"{_MS}:RotaryEmbedding")
def rotary_embedding(node: Node) -> TensorValue:
    x, positions = node.tensor(0), ops.cast(node.tensor(1), DType.int64)
    cosines, sines = node.tensor(2), node.tensor(3)
    heads = node.attr("num_heads", 0)
    flat = x.rank == 3
    if flat:
        if not heads:
            # without the attribute, all elements of a head rotate
            width = 2 * node.static(cosines.shape[1], 2)
            heads = node.static(x.shape[2]) // width
        x = split_heads(x, heads)
    length = x.shape[2]
    if positions.rank == 1 and positions.shape[0] == 1:
        # one offset for the batch: its tokens are adjacent
        line = ops.range(0, length, 1, dtype=DType.int64, device=x.device)
        positions = ops.unsqueeze(line + positions, 0)
    cosines, sines = (ops.unsqueeze(ops.gather(t, positions, 0), 1) for t in (cosines, sines))
    y = rotate_pairs(x, cosines, sines, bool(node.attr("interleaved", 0)))
    return joined_heads(y) if flat else y


def _extend_cache(past: TensorValue, new: TensorValue, start: TensorValue) -> TensorValue:
    """A cache with new rows at a position of each sequence."""
    # room for as many rows as are new: where a sequence ends is known in a run only
    rows = ops.broadcast_to(ops.constant(np.zeros((), new.dtype.to_numpy())), new.shape)
    places = ops.broadcast_to(_places(new.shape[2], new, 2) + start, new.shape)
    return ops.scatter(ops.concat([past, rows], 2), new, places, 2)


@op(f"{_MS}:GroupQueryAttention")
def group_query_attention(node: Node) -> Any:
    """Grouped queries over a cache whose last rows are those of this call."""
    heads, groups = node.attr("num_heads"), node.attr("kv_num_heads")
    query = node.tensor(0)
    if node.has(1):
        q, k, v = (
            split_heads(query, heads),
            split_heads(node.tensor(1), groups),
            split_heads(node.tensor(2), groups),
        )
    else:
        size = node.static(query.shape[2]) // (heads + 2 * groups)
        parts = ops.split(query, [heads * size, groups * size, groups * size], 2)
        q, k, v = (
            split_heads(part, n) for part, n in zip(parts, (heads, groups, groups), strict=True)
        )
    length = q.shape[2]
    past = node.tensor(3).shape[2] if node.has(3) else Dim(0)
    seen = ops.cast(ops.reshape(node.tensor(5), [q.shape[0], 1, 1, 1]), DType.int64) + 1
    start = seen - TensorValue(length)
    if node.attr("do_rotary", 0):
        places = ops.reshape(_places(length, q, 2) + start, [q.shape[0], length])
        places = ops.where(places < 0, 0, places)
        cosines, sines = (ops.unsqueeze(ops.gather(node.tensor(i), places, 0), 1) for i in (7, 8))
        interleaved = bool(node.attr("rotary_interleaved", 0))
        q, k = (
            rotate_pairs(q, cosines, sines, interleaved),
            rotate_pairs(k, cosines, sines, interleaved),
        )
    if node.has(3) and past != 0:
        k, v = (_extend_cache(node.tensor(index), new, start) for index, new in ((3, k), (4, v)))
    keys = k.shape[2]
    # sequences that are shorter than the cache have their new rows behind their own old ones
    place = _places(length, q, 2) + ops.where(start < 0, 0, start)
    allowed = _places(keys, q, 3) <= place
    window = node.attr("local_window_size", -1)
    if window > 0:
        allowed = ops.logical_and(allowed, _places(keys, q, 3) > place - window)
    bias = mask_bias(allowed, q.dtype, -math.inf)
    if node.has(10):
        bias = bias + node.tensor(10)
    scale = node.attr("scale", 0.0) or 1 / math.sqrt(node.static(q.shape[3]))
    repeats = heads // groups
    wide_k, wide_v = k, v
    if repeats > 1:
        wide_k, wide_v = (ops.repeat_interleave(t, repeats, 1) for t in (k, v))
    y = attend(q, wide_k, wide_v, scale, bias, node.attr("softcap", 0.0))
    return joined_heads(y), k, v
