"""Choosing the next token of each row of logits.

The distribution is `softmax(logits / temperature)`, cut down in this order: to the `top_k` most likely tokens, then to the fewest of
those that together have the share `top_p`, then to those with at least `min_p` times the probability of the likeliest. Of equal logits the lower
index is likelier. The token is the first, in order of index, at which the running sum of weights exceeds `u` times the total, where `u` is a number in
[0, 1) that the row's seed alone decides: `u = (mix(seed) >> 40) / 2**24`, with the finaliser of splitmix64.

A cut is a threshold (a logit and, among its equals, the last index that is in): a heap finds it for small `top_k`, bisection over the
bits of the logit otherwise. Nothing is sorted, and no weight is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.attention.paged_cache import check_size
from max._kernel_library.indexing.selection import NEGATIVE_INFINITY, better, keep_best, sort_heap
from max._kernel_library.lowering import KernelCall, Operand, view

SMALL_K = 256
"""Up to so many candidates are kept in a heap."""


@k.inline
def greatest(row: Any, width: int) -> Any:
    """Value and index of the greatest logit, the first of equals; NaN never is."""
    size = row.shape[0]
    best = k.splat(k.f32(NEGATIVE_INFINITY), width)
    places = k.splat(k.i32(0), width)
    for j, mask in k.vectors(size, width):
        here = row.load(j, width=width, mask=mask, other=NEGATIVE_INFINITY)
        ahead = here > best
        best = k.select(ahead, here, best)
        places = k.select(ahead, k.iota(k.i32, width) + k.i32(j), places)
    value = k.f32(NEGATIVE_INFINITY)
    index = k.i64(0)
    for lane in k.static_range(width):
        if better(best[lane], k.i64(places[lane]), value, index):
            value = best[lane]
            index = k.i64(places[lane])
    return value, index


@k.inline
def ordered(value: Any) -> Any:
    """A float as an integer with the same order."""
    bits = k.bitcast(value, k.i32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@k.inline
def from_ordered(key: Any) -> Any:
    """The float that `ordered` gave."""
    return k.bitcast(key ^ ((key >> 31) & 0x7FFFFFFF), k.f32)


@k.inline
def weights(logits: Any, peak: Any, inverse_temperature: Any) -> Any:
    """Unnormalised probabilities: 1 for logits that equal the greatest one, also an infinite one; 0 for NaN."""
    zeros = k.splat(k.f32(0), logits.width)
    scaled = k.exp(k.select(logits == peak, zeros, (logits - peak) * inverse_temperature))
    return k.select(scaled >= 0, scaled, zeros)


@k.inline
def mass_above(
    row: Any,
    threshold: Any,
    included: bool,
    peak: Any,
    inverse_temperature: Any,
    counted: bool,
    width: int,
) -> Any:
    """Sum of weights (number of tokens where `counted`) of the logits above a threshold, or at it too where `included`."""
    total = k.splat(k.f32(0), width)
    number = k.splat(k.i32(0), width)
    for j, mask in k.vectors(row.shape[0], width):
        here = row.load(j, width=width, mask=mask, other=NEGATIVE_INFINITY)
        inside = here >= threshold if included else here > threshold
        if mask is not None:
            inside = inside & mask
        if counted:
            number = number + k.cast(inside, k.i32)
        else:
            total = total + k.select(
                inside, weights(here, peak, inverse_temperature), k.splat(k.f32(0), width)
            )
    if counted:
        return k.f32(k.reduce_add(number))
    else:
        return k.reduce_add(total)


@k.inline
def cut(
    row: Any,
    wanted: Any,
    lowest: Any,
    peak: Any,
    inverse_temperature: Any,
    counted: bool,
    width: int,
) -> Any:
    """The greatest threshold with at least the `wanted` mass at or above it, not under `lowest`, and how many of its equals are in."""
    low = ordered(lowest)
    high = ordered(peak)
    while low < high:
        # rounded up, and without overflow
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        if (
            mass_above(row, from_ordered(middle), True, peak, inverse_temperature, counted, width)
            >= wanted
        ):
            low = middle
        else:
            high = middle - 1
    threshold = from_ordered(low)
    above = mass_above(row, threshold, False, peak, inverse_temperature, counted, width)
    each = k.f32(1)
    if not counted:
        each = weights(k.splat(threshold, width), peak, inverse_temperature)[0]
    ties = k.ceil((wanted - above) / each) if each > 0 else k.f32(1)
    return threshold, k.max(k.i64(ties), 1)


@k.inline
def index_of_tie(row: Any, threshold: Any, number: Any) -> Any:
    """Index of the `number`-th logit that equals the threshold, or the last index."""
    index = k.i64(0)
    left = k.i64(number)
    for j in range(row.shape[0]):
        if left > 0 and row[j] == threshold:
            left -= 1
            index = k.i64(j)
    return index if left == 0 else k.i64(row.shape[0])


@k.inline
def splitmix64(seed: Any, index: Any) -> Any:
    """Number `index`, from 1, of the sequence of 64 well mixed bits that a seed has (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = seed + k.u64(index) * k.u64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * k.u64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * k.u64(0x94D049BB133111EB)
    return x ^ (x >> 31)


@k.inline
def uniform(seed: Any) -> Any:
    """A number in [0, 1) from a seed."""
    return k.f32(k.i64(splitmix64(seed, 1) >> 40)) * k.f32(1 / 16777216)


@k.inline
def heap_threshold(
    row: Any, count: Any, share: Any, peak: Any, inverse_temperature: Any, values: Any,
    places: Any, width: int,
) -> Any:  # fmt: skip
    """Threshold and last tied index after the cuts to `count` tokens and to `share` of their mass."""
    keep_best(values, places, row, count, False, 4 * width)
    kept = k.min(count, row.shape[0])
    sort_heap(values, places, kept)
    last = k.i64(kept - 1)
    if share < 1:
        total = k.f32(0)
        for i in range(kept):
            total += weights(k.splat(values[i], 1), peak, inverse_temperature)[0]
        last = k.i64(0)
        sum_so_far = weights(k.splat(values[0], 1), peak, inverse_temperature)[0]
        while last + 1 < kept and sum_so_far < share * total:
            last += 1
            sum_so_far += weights(k.splat(values[last], 1), peak, inverse_temperature)[0]
    return values[last], k.i64(places[last])


@k.inline
def bisected_threshold(
    row: Any, count: Any, share: Any, peak: Any, inverse_temperature: Any, width: int
) -> Any:
    """As `heap_threshold`, for any number of tokens; `count` 0 or less keeps all."""
    threshold = k.f32(NEGATIVE_INFINITY)
    last = k.i64(row.shape[0])
    if count > 0 and count < row.shape[0]:
        threshold, ties = cut(row, k.f32(count), threshold, peak, inverse_temperature, True, width)
        last = index_of_tie(row, threshold, ties)
    if share < 1:
        above = mass_above(row, threshold, False, peak, inverse_temperature, False, width)
        tied = k.f32(0)
        for j in range(k.min(last + 1, row.shape[0])):
            if row[j] == threshold:
                tied += 1
        each = weights(k.splat(threshold, width), peak, inverse_temperature)[0]
        wanted = share * (above + tied * each)
        narrower, ties = cut(row, wanted, threshold, peak, inverse_temperature, False, width)
        last_tie = index_of_tie(row, narrower, ties)
        if narrower > threshold:
            last = last_tie
        else:
            last = k.min(last, last_tie)
        threshold = narrower
    return threshold, last


@k.inline
def is_kept(logits: Any, index: Any, threshold: Any, last: Any, least: Any, scaled: Any) -> Any:
    """Which tokens passed the cuts."""
    return (
        ((logits > threshold) | ((logits == threshold) & (index <= last)))
        & (scaled >= least)
        & (scaled > 0)
    )


@k.inline
def draw(
    row: Any,
    threshold: Any,
    last: Any,
    least: Any,
    peak: Any,
    inverse_temperature: Any,
    u: Any,
    otherwise: Any,
    width: int,
) -> Any:
    """The first kept token at which the running sum of weights exceeds `u` times their total."""
    size = row.shape[0]
    zeros = k.splat(k.f32(0), width)
    total = k.f32(0)
    for j, mask in k.vectors(size, width):
        here = row.load(j, width=width, mask=mask, other=NEGATIVE_INFINITY)
        scaled = weights(here, peak, inverse_temperature)
        kept = is_kept(here, k.iota(k.i64, width) + j, threshold, last, least, scaled)
        total += k.reduce_add(k.select(kept, scaled, zeros))
    target = u * total
    token = k.i64(otherwise)
    sum_so_far = k.f32(0)
    found = False
    for j, mask in k.vectors(size, width):
        if not found:
            here = row.load(j, width=width, mask=mask, other=NEGATIVE_INFINITY)
            scaled = weights(here, peak, inverse_temperature)
            kept = is_kept(here, k.iota(k.i64, width) + j, threshold, last, least, scaled)
            some = k.select(kept, scaled, zeros)
            after = sum_so_far + k.reduce_add(some)
            if after > target:
                for lane in k.static_range(width):
                    weight = some[lane]
                    if not found and weight > 0:
                        sum_so_far += weight
                        token = k.i64(j) + lane
                        found = sum_so_far > target
                found = True
            sum_so_far = after
    return token


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
    """`out[row]` is the token drawn from row `row` of `logits`; greedy where the temperature is 0 or `top_k` is 1."""
    width = ctx.target.width(k.f32)
    values = ctx.scratch(k.f32, (SMALL_K,))
    places = ctx.scratch(k.i64, (SMALL_K,))
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
        # NaN is no number that fits
        if not temperature[b] >= 0:
            raise ValueError(
                "the temperature of row {} is {}, expected 0 or more", b, temperature[b]
            )
        if not (top_p[b] >= 0 and top_p[b] <= 1):
            raise ValueError("top_p of row {} is {}, expected 0 to 1", b, top_p[b])
        if not (min_p[b] >= 0 and min_p[b] <= 1):
            raise ValueError("min_p of row {} is {}, expected 0 to 1", b, min_p[b])
        peak, best = greatest(row, width)
        token = best
        count = k.i64(top_k[b])
        # a row of nothing but -inf or NaN has no distribution
        if temperature[b] > 0 and count != 1 and peak > NEGATIVE_INFINITY:
            inverse = 1 / temperature[b]
            threshold = k.f32(NEGATIVE_INFINITY)
            last = k.i64(row.shape[0])
            if count > 0 and count <= SMALL_K:
                threshold, last = heap_threshold(
                    row, count, top_p[b], peak, inverse, values, places, width
                )
            elif count > 0 or top_p[b] < 1:
                threshold, last = bisected_threshold(row, count, top_p[b], peak, inverse, width)
            token = draw(
                row, threshold, last, min_p[b], peak, inverse, uniform(k.u64(seed[b])), best, width
            )
        out[b] = token


def _lower_sample(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    args = (
        view("result", 0, results[0]),
        *(view("operand", i, operand) for i, operand in enumerate(operands)),
    )
    return KernelCall(sample_token, args)


LOWERINGS = {"mo.sample.token": _lower_sample}
