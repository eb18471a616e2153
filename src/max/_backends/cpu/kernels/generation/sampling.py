"""Choosing the next token of each row of logits.

The distribution is `softmax(logits / temperature)`, cut in this order: to the `top_k` most likely tokens, then to the
fewest of those whose probabilities sum to `top_p`, then to those with at least `min_p` times the greatest probability.
Of equal logits the lower index ranks first. The token is the first, in order of index, at which the running sum of
weights exceeds `u` times the total, where `u` in [0, 1) depends on the row's seed only: `u = (mix(seed) >> 40) /
2**24`, with the finalizer of splitmix64.

A cut is a threshold: a logit, and the last index among equal logits that is kept. A heap finds it for `top_k` up to
`SMALL_K`, otherwise bisection over the bits of the logit, 31 passes over the row. Rows are not sorted, and weights are
not stored. A task is a row of logits. A row of NaN only has no token: the result is `NO_TOKEN`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.indexing.selection import NEGATIVE_INFINITY, keep_best, sort_heap
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, operand_views, view

SMALL_K = 256
"""The maximum number of candidates that are kept in a heap."""
LAST_INDEX = 2**31 - 1
NO_TOKEN = -1
"""The result for a row whose logits are all NaN."""


@k.inline
def greatest(row: k.View, width: int) -> Any:
    """Value and index of the greatest logit, the first of equals; NaN never is."""
    size = row.shape[0]
    best = k.splat(k.f32(NEGATIVE_INFINITY), width)
    indices = k.splat(k.i32(0), width)
    for j, mask in k.vectors(size, width):
        logits = row.load(j, width=width, mask=mask, other=NEGATIVE_INFINITY)
        greater = logits > best
        best = k.select(greater, logits, best)
        indices = k.select(greater, k.iota(k.i32, width) + k.i32(j), indices)
    value = k.reduce_max(best)
    # of equal logits in several lanes the first; lanes that saw no number have index 0
    none = k.splat(k.i32(LAST_INDEX), width)
    index = k.i64(k.reduce_min(k.select(best == value, indices, none)))
    # of zeros the sign of the first
    return row[index] if value > NEGATIVE_INFINITY else value, index


@k.inline
def has_number(row: k.View) -> Any:
    """Whether a logit is not NaN."""
    any_number = False
    for j in range(row.shape[0]):
        if row[j] == row[j]:
            any_number = True
    return any_number


@k.inline
def order_key(value: k.Value) -> Any:
    """A float as an integer with the same order."""
    bits = k.bitcast(value, k.i32)
    # of negative floats a greater magnitude has the greater bits
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@k.inline
def from_order_key(key: k.Integer) -> Any:
    """The inverse of `ordered`."""
    return k.bitcast(key ^ ((key >> 31) & 0x7FFFFFFF), k.f32)


class Distribution(NamedTuple):
    """The distribution of a row of logits.

    Args:
        row: The logits.
        peak: The greatest of them.
        inverse_temperature: 1 / temperature.
        width: Lanes of a vector.
    """

    row: Any
    peak: Any
    inverse_temperature: Any
    width: int


@k.inline
def token_weights(logits: k.SIMD, d: Distribution) -> Any:
    """Unnormalized probabilities: 1 for logits that equal the greatest one, also an infinite one; 0 for NaN."""
    zeros = k.splat(k.f32(0), logits.width)
    scaled = k.select(logits == d.peak, zeros, (logits - d.peak) * d.inverse_temperature)
    scaled = k.exp(scaled)
    return k.select(scaled >= 0, scaled, zeros)  # 0 for NaN, which is not >= 0


@k.inline
def weight_of(logit: k.Value, d: Distribution, width: int) -> Any:
    """The weight of one logit, computed in vectors of `width`."""
    return token_weights(k.splat(logit, width), d)[0]


@k.inline
def mass_above(d: Distribution, threshold: k.Value, included: bool, counted: bool) -> Any:
    """The sum of weights (number of tokens where `counted`) of the logits above a threshold, or also equal to it where
    `included`.
    """
    width = d.width
    total = k.splat(k.f32(0), width)
    number = k.splat(k.i32(0), width)
    for j, mask in k.vectors(d.row.shape[0], width):
        logits = d.row.load(j, width=width, mask=mask, other=NEGATIVE_INFINITY)
        # lanes behind the last logit are -inf, and no threshold that includes equals is
        inside = logits >= threshold if included else logits > threshold
        if counted:
            number = number + k.cast(inside, k.i32)
        else:
            zeros = k.splat(k.f32(0), width)
            total = total + k.select(inside, token_weights(logits, d), zeros)
    if counted:
        return k.f32(k.reduce_add(number))
    else:
        return k.reduce_add(total)


@k.inline
def mass_threshold(d: Distribution, mass: k.Value, lowest: k.Value, counted: bool) -> Any:
    """The greatest threshold, at least `lowest`, with at least `mass` at or above it, and the number of equal logits
    that are kept.
    """
    low = order_key(lowest)
    high = order_key(d.peak)
    while low < high:
        # rounded up, without overflow
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        if mass_above(d, from_order_key(middle), True, counted) >= mass:
            low = middle
        else:
            high = middle - 1
    threshold = from_order_key(low)
    above = mass_above(d, threshold, False, counted)
    # mass counted in tokens has weight 1
    weight = k.f32(1)
    if not counted:
        weight = weight_of(threshold, d, d.width)
    # of equal logits as many as the mass still needs
    ties = k.ceil((mass - above) / weight) if weight > 0 else k.f32(1)
    return threshold, k.max(k.i64(ties), 1)


@k.inline
def index_of_tie(row: k.View, threshold: k.Value, number: k.Value) -> Any:
    """Index of the `number`-th logit that equals the threshold, or the last index."""
    index = k.i64(0)
    remaining = k.i64(number)
    for j in range(row.shape[0]):
        if remaining > 0 and row[j] == threshold:
            remaining -= 1
            index = k.i64(j)
    return index if remaining == 0 else k.i64(row.shape[0])


@k.inline
def splitmix64(seed: k.Value, index: k.Value) -> Any:
    """Element `index`, from 1, of the sequence of 64-bit numbers of a seed (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, 2014).
    """
    x = seed + k.u64(index) * k.u64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * k.u64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * k.u64(0x94D049BB133111EB)
    return x ^ (x >> 31)


@k.inline
def uniform(seed: k.Value) -> Any:
    """A number in [0, 1) from a seed."""
    # f32 holds 24 bits exactly
    return k.f32(k.i64(splitmix64(seed, 1) >> 40)) * k.f32(1 / 16777216)


@k.inline
def heap_threshold(
    d: Distribution, count: k.Value, share: k.Value, values: k.View, indices: k.View
) -> Any:
    """Threshold and last tied index after the cuts to `count` tokens and to `share` of their mass.

    Args:
        d: The distribution.
        count: `top_k`, at most `SMALL_K`.
        share: `top_p`.
        values: Scratch memory for logits.
        indices: Scratch memory for their indices.
    """
    keep_best(values, indices, d.row, count, False, 4 * d.width, True)
    kept = k.min(count, d.row.shape[0])
    # the heap is sorted, best first: a prefix of it is the cut
    sort_heap(values, indices, kept, True)
    last = k.i64(kept - 1)
    if share < 1:
        total = k.f32(0)
        for i in range(kept):
            total += weight_of(values[i], d, 1)
        last = k.i64(-1)
        sum_so_far = k.f32(0)
        # at least one token is kept, whatever the share
        while last + 1 < kept and (last < 0 or sum_so_far < share * total):
            last += 1
            sum_so_far += weight_of(values[last], d, 1)
    return values[last], k.i64(indices[last])


@k.inline
def bisected_threshold(d: Distribution, count: k.Value, share: k.Value) -> Any:
    """As `heap_threshold`, for any number of tokens; `count` 0 or less keeps all."""
    row = d.row
    threshold = k.f32(NEGATIVE_INFINITY)
    last = k.i64(row.shape[0])
    # a cut to all tokens is none
    if count > 0 and count < row.shape[0]:
        threshold, ties = mass_threshold(d, k.f32(count), threshold, True)
        last = index_of_tie(row, threshold, ties)
    if share < 1:
        above = mass_above(d, threshold, False, False)
        tied = k.f32(0)
        for j in range(k.min(last + 1, row.shape[0])):
            if row[j] == threshold:
                tied += 1
        mass = share * (above + tied * weight_of(threshold, d, d.width))
        # at the same threshold no more equals are kept: the share of their mass is less than their mass
        threshold, ties = mass_threshold(d, mass, threshold, False)
        last = index_of_tie(row, threshold, ties)
    return threshold, last


class Cut(NamedTuple):
    """The cuts of a distribution.

    Args:
        threshold: The least logit that is kept.
        last: The last index that is kept of logits equal to it.
        min_weight: The least weight that is kept.
    """

    threshold: Any
    last: Any
    min_weight: Any


@k.inline
def kept_weights(d: Distribution, c: Cut, j: k.Integer, mask: k.Mask | None) -> Any:
    """The weights of a vector of tokens from `j` on, 0 for those that are cut."""
    width = d.width
    logits = d.row.load(j, width=width, mask=mask, other=NEGATIVE_INFINITY)
    scaled = token_weights(logits, d)
    index = k.iota(k.i64, width) + j
    kept = (
        ((logits > c.threshold) | ((logits == c.threshold) & (index <= c.last)))
        & (scaled >= c.min_weight)
        & (scaled > 0)
    )
    return k.select(kept, scaled, k.splat(k.f32(0), width))


@k.inline
def draw(d: Distribution, c: Cut, u: k.Value, default: k.Value, lanes: k.View) -> Any:
    """The first kept token at which the running sum of weights exceeds `u` times their total; `default` where there is
    none. `lanes` is scratch memory for a vector of weights.
    """
    size = d.row.shape[0]
    total = k.f32(0)
    for j, mask in k.vectors(size, d.width):
        # sums in the order of vectors, as in the second pass
        total += k.reduce_add(kept_weights(d, c, j, mask))
    target = u * total
    token = k.i64(default)
    sum_so_far = k.f32(0)
    drawn = False
    for j, mask in k.vectors(size, d.width):
        if not drawn:
            kept = kept_weights(d, c, j, mask)
            after = sum_so_far + k.reduce_add(kept)
            if after > target:
                # a loop at run time: it runs once, and unrolled it is an eighth of the kernel's code
                lanes.store(0, value=kept)
                for lane in range(d.width):
                    weight = lanes[lane]
                    if not drawn and weight > 0:
                        sum_so_far += weight
                        token = k.i64(j) + lane
                        drawn = sum_so_far > target
                drawn = True
            sum_so_far = after
    return token


@k.inline
def drawn_token(
    d: Distribution,
    default: k.Value,
    count: k.Value,
    top_p: k.Value,
    min_p: k.Value,
    seed: k.Value,
    values: k.View,
    indices: k.View,
) -> Any:
    """The token that is drawn from a distribution after its cuts.

    Args:
        d: The distribution.
        default: The token where no weight is greater than 0.
        count: `top_k`; 0 or less keeps all.
        top_p: The share of the mass that is kept.
        min_p: The least share of the greatest probability that is kept.
        seed: The seed of the row.
        values: Scratch memory for `SMALL_K` logits.
        indices: Scratch memory for their indices.
    """
    row = d.row
    threshold = k.f32(NEGATIVE_INFINITY)
    last = k.i64(row.shape[0])
    if count > 0 and count <= SMALL_K:
        threshold, last = heap_threshold(d, count, top_p, values, indices)
    elif count > 0 or top_p < 1:
        threshold, last = bisected_threshold(d, count, top_p)
    u = uniform(k.u64(seed))
    return draw(d, Cut(threshold, last, min_p), u, default, values)


@k.kernel
def sample_token(
    out: k.Output,
    logits: k.Input[k.f32, 2],
    temperature: k.Input,
    top_k: k.Input,
    top_p: k.Input,
    min_p: k.Input,
    seed: k.Input,
    ctx: k.Context,
) -> None:
    """`out[row]` is the token drawn from row `row` of `logits`; greedy where the temperature is 0 or `top_k` is 1;
    `NO_TOKEN` where all logits are NaN.
    """
    width = ctx.target.width(k.f32)
    values = ctx.scratch(k.f32, (SMALL_K,))
    indices = ctx.scratch(k.i64, (SMALL_K,))
    batch = logits.shape[0]
    if logits.shape[1] == 0 and batch > 0:
        raise ValueError("the logits have 0 columns, expected 1 or more")
    check_size("the result", out.shape[0], batch)
    check_size("temperature", temperature.shape[0], batch)
    check_size("top_k", top_k.shape[0], batch)
    check_size("top_p", top_p.shape[0], batch)
    check_size("min_p", min_p.shape[0], batch)
    check_size("seed", seed.shape[0], batch)
    for b in ctx.parallel(logits.shape[0], grain=1):
        row = logits[b]
        # also refuses NaN
        if not temperature[b] >= 0:
            raise ValueError(
                "the temperature of row {} is {}, expected 0 or more", b, temperature[b]
            )
        if not (top_p[b] >= 0 and top_p[b] <= 1):
            raise ValueError("top_p of row {} is {}, expected 0 to 1", b, top_p[b])
        if not (min_p[b] >= 0 and min_p[b] <= 1):
            raise ValueError("min_p of row {} is {}, expected 0 to 1", b, min_p[b])
        peak, best = greatest(row, width)
        # greedy unless a distribution replaces it
        token = best
        count = k.i64(top_k[b])
        if not peak > NEGATIVE_INFINITY and not has_number(row):
            token = k.i64(NO_TOKEN)
        # a row of only -inf or NaN has no distribution
        if temperature[b] > 0 and count != 1 and peak > NEGATIVE_INFINITY:
            d = Distribution(row, peak, 1 / temperature[b], width)
            token = drawn_token(d, best, count, top_p[b], min_p[b], seed[b], values, indices)
        out[b] = token


def _lower_sample(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.sample.token`."""
    args = (
        view("result", 0, results[0]),
        *operand_views(operands),
    )
    return KernelCall(sample_token, args)


LOWERINGS = {"mo.sample.token": _lower_sample}
