"""Cuts of a whole row of logits, and the draw of a token from it.

The nucleus of `top_p` is found by passes that sum the weights above several bounds at once. The interval of logits that
holds the cut becomes an eighth of its length each time, until its tokens fit into the memory of candidates, or until
they are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.online_softmax import NEGATIVE_INFINITY
from max._backends.cpu.kernels.generation.candidates import (
    CAPACITY,
    Candidates,
    bound_of,
    gather_candidates,
    mass_cut,
    next_above,
    ties_of_mass,
    weigh_candidates,
)
from max._backends.cpu.kernels.generation.logit_rows import (
    BLOCKS,
    LINE,
    Distribution,
    LogitRow,
    block_top,
    from_order_key,
    load_logits,
    order_key,
    token_weights,
    weight_of,
)

WIDTH = 16
"""Lanes of a pass that sums weights: eight sums of this width are in registers."""
BOUNDS = 8
"""The number of bounds of a pass."""
LINEAR_PASSES = 3
"""The number of passes whose bounds are equidistant logits. Later bounds are equidistant in the bits of a float, so the
search ends for every interval."""


class Memory(NamedTuple):
    """Scratch memory of a worker.

    Args:
        tops: Of the greatest logits of lanes `[BLOCKS, LINE]`.
        candidates: Of candidates.
        bounds: Of the bounds of a pass `[BOUNDS]`.
        masses: Of the weights above them, f64 `[BOUNDS]`.
        sums: Of the weights of blocks `[BLOCKS]`.
    """

    tops: Any
    candidates: Any
    bounds: Any
    masses: Any
    sums: Any


@k.inline
def worker_memory(ctx: k.Context) -> Any:
    """The scratch memory of this worker."""
    return Memory(
        ctx.scratch(k.f32, (BLOCKS, LINE)),
        Candidates(
            ctx.scratch(k.f32, (CAPACITY + LINE,)),
            ctx.scratch(k.i32, (CAPACITY + LINE,)),
            ctx.scratch(k.f32, (CAPACITY + LINE,)),
        ),
        ctx.scratch(k.f32, (BOUNDS,)),
        ctx.scratch(k.f64, (BOUNDS,)),
        ctx.scratch(k.f32, (BLOCKS,)),
    )


class Cut(NamedTuple):
    """The cuts of a distribution.

    Args:
        threshold: A logit; all that are greater are kept.
        last: The last index that is kept of logits equal to it.
        min_weight: The least weight that is kept.
    """

    threshold: Any
    last: Any
    min_weight: Any


@k.inline
def tokens_above(row: LogitRow, bound: k.Value) -> Any:
    """The number of logits above a bound."""
    number = k.splat(k.i32(0), LINE)
    for j, mask in k.vectors(row.logits.shape[0], LINE):
        number = number + k.cast(load_logits(row, j, mask, LINE) > bound, k.i32)
    return k.i64(k.reduce_add(number))


@k.inline
def count_cut(d: Distribution, count: k.Integer, lowest: k.Value) -> Any:
    """A logit that the `count` best tokens reach, and how many of those that equal it are kept; `lowest` and 0 if no
    more tokens are above that.
    """
    threshold = k.f32(lowest)
    ties = k.i64(0)
    if tokens_above(d.row, lowest) > count:
        bound = bound_of(
            lambda bound: tokens_above(d.row, bound),  # pyright: ignore[reportUnknownLambdaType]
            lowest,
            d.peak,
            k.i64(count),
            k.i64(-1),
        )
        threshold = next_above(bound)
        ties = count - tokens_above(d.row, threshold)
    return threshold, ties


@k.inline
def place_of_tie(row: LogitRow, threshold: k.Value, number: k.Integer) -> Any:
    """The index of the `number`-th logit that equals a threshold, of the last one if there are fewer; -1 if there is
    none.
    """
    place = k.i64(-1)
    remaining = k.i64(number)
    for j, mask in k.vectors(row.logits.shape[0], LINE):
        bits = k.bitcast(load_logits(row, j, mask, LINE) == threshold, k.u64)
        while bits != 0 and remaining > 0:
            k.brief()
            place = k.i64(j) + k.i64(k.count_trailing_zeros(bits))
            bits = bits & (bits - 1)
            remaining -= 1
    return place


class Interval(NamedTuple):
    """An interval of logits that holds a cut.

    Args:
        low: The order key of the bound below it.
        high: The order key of its greatest logit.
    """

    low: Any
    high: Any


@k.inline
def write_bounds(bounds: k.View, interval: Interval, bottom: k.Value, passes: k.Integer) -> None:
    """Writes bounds in an interval, the greatest first; the last one is that of the interval.

    Args:
        bounds: Receives them `[BOUNDS]`.
        interval: The interval.
        bottom: The last one but one in the first pass, in which the interval may be long.
        passes: The number of passes before.
    """
    highest = from_order_key(interval.high)
    lowest = k.f32(bottom) if passes == 0 else from_order_key(interval.low)
    parts = k.f32(BOUNDS - 1) if passes == 0 else k.f32(BOUNDS)
    step = (highest - lowest) / parts
    # false for NaN, too
    linear = passes < LINEAR_PASSES and step < float("inf")
    length = k.i64(interval.high) - k.i64(interval.low)
    for i in range(BOUNDS - 1):
        key = k.i32(k.i64(interval.high) - length * (i + 1) // BOUNDS)
        if linear:
            key = order_key(highest - step * k.f32(i + 1))
        # below the greatest logit, so that each pass makes the interval shorter
        bounds[i] = from_order_key(k.max(k.min(key, interval.high - 1), interval.low))
    bounds[BOUNDS - 1] = from_order_key(interval.low)


@k.inline
def masses_above(d: Distribution, highest: k.Value, bounds: k.View, masses: k.View) -> None:
    """Writes the sum of the weights above each bound, of logits up to `highest`."""
    row = d.row
    zeros = k.splat(k.f32(0), WIDTH)
    limits = [k.splat(bounds[i], WIDTH) for i in k.static_range(BOUNDS)]
    for i in range(BOUNDS):
        masses[i] = 0.0
    for block in range(row.blocks):
        if block_top(row, block) > bounds[BOUNDS - 1]:
            start = block * row.block_size
            # of a block only, as a long sum of equal weights drifts
            sums = k.tile(k.f32, (BOUNDS,), width=WIDTH, fill=0.0)
            for j, mask in k.vectors(
                start, k.min(start + row.block_size, row.logits.shape[0]), WIDTH
            ):
                logits = load_logits(row, j, mask, WIDTH)
                weights = k.select(logits <= highest, token_weights(logits, d), zeros)
                for i in k.static_range(BOUNDS):
                    sums[i] = sums[i] + k.select(logits > limits[i], weights, zeros)
            for i in k.static_range(BOUNDS):
                masses[i] += k.f64(k.reduce_add(sums[i]))


@k.inline
def first_bottom(d: Distribution, share: k.Value) -> Any:
    """A logit that is probably below the cut to a share of the mass, and not far below it."""
    # all tokens below it together have less weight than is cut
    exponent = k.log(1 - share) - k.log(k.f32(d.row.logits.shape[0]))
    bottom = d.peak + exponent * d.temperature
    # nor further below the least top than that is below the greatest
    least = k.splat(d.peak, LINE)
    for block in range(d.row.blocks):
        tops = d.row.tops.load(block, 0, width=LINE)
        least = k.select((tops < least) & (tops > NEGATIVE_INFINITY), tops, least)
    lowest_top = k.reduce_min(least)
    return k.max(bottom, lowest_top - (d.peak - lowest_top))


@k.inline
def mass_row_cut(
    d: Distribution, share: k.Value, lowest: k.Value, ties: k.Integer, m: Memory
) -> Any:
    """The least logit that is kept if the best tokens are kept until their weights sum to a share of all, and how many
    of those that equal it are kept.

    Args:
        d: The distribution.
        share: `top_p`, less than 1.
        lowest: The logit of the cut before, or a bound below all weights.
        ties: How many tokens that equal it are among all.
        m: Scratch memory.
    """
    bounds = m.bounds
    masses = m.masses
    bottom = k.max(first_bottom(d, share), lowest)
    low = order_key(lowest)
    high = order_key(d.peak)
    above = k.f64(0)
    mass = k.f64(0)
    passes = k.i64(0)
    fits = False
    tied = False
    # one pass at least, for the mass of all
    while passes == 0 or (k.i64(high) - k.i64(low) > 1 and not fits and not tied):
        write_bounds(bounds, Interval(low, high), bottom, passes)
        masses_above(d, from_order_key(high), bounds, masses)
        if passes == 0:
            total = masses[BOUNDS - 1]
            mass = k.f64(share) * (total + k.f64(ties) * k.f64(weight_of(lowest, d)))
            tied = total < mass
            above = total if tied else k.f64(0)
        passes += 1
        if not tied:
            place = k.i64(0)
            while place < BOUNDS - 1 and above + masses[place] < mass:
                k.brief()
                place += 1
            before = masses[place - 1] if place > 0 else k.f64(0)
            inside = masses[place] - before
            above += before
            bound = bounds[place]
            high = order_key(bounds[place - 1]) if place > 0 else high
            low = order_key(bound)
            # each token in the interval has more weight than its bound
            fits = inside * 1.01 <= k.f64(weight_of(bound, d)) * (CAPACITY - 2 * LINE)
    threshold = from_order_key(high)
    if tied:
        threshold = k.f32(lowest)
    number = ties_of_mass(d, threshold, mass - above)
    if fits and k.i64(high) - k.i64(low) > 1:
        bound = from_order_key(low)
        count = gather_candidates(d.row, m.candidates, bound, threshold, CAPACITY, d.peak)
        lines = weigh_candidates(d, m.candidates, count)
        threshold, number = mass_cut(d, m.candidates, lines, bound, threshold, mass - above)
    return threshold, number


@k.inline
def kept_weights(d: Distribution, c: Cut, j: k.Integer, mask: k.Mask | None) -> Any:
    """The weights of a line of tokens from `j` on, 0 for those that are cut."""
    logits = load_logits(d.row, j, mask, LINE)
    scaled = token_weights(logits, d)
    index = k.iota(k.i32, LINE) + k.i32(j)
    kept = (logits > c.threshold) | ((logits == c.threshold) & (index <= k.i32(c.last)))
    return k.select(kept & (scaled >= c.min_weight), scaled, k.splat(k.f32(0), LINE))


@k.inline
def drawn_from_row(d: Distribution, c: Cut, u: k.Value, m: Memory) -> Any:
    """The first kept token at which the running sum of weights exceeds `u` times their total.

    Args:
        d: The distribution.
        c: Its cuts.
        u: In [0, 1).
        m: Scratch memory.
    """
    sums = m.sums
    lanes = m.candidates.weights
    row = d.row
    size = row.logits.shape[0]
    total = k.f64(0)
    for block in range(row.blocks):
        sum_of_lanes = k.splat(k.f32(0), LINE)
        if block_top(row, block) >= c.threshold:
            start = block * row.block_size
            for j, mask in k.vectors(start, k.min(start + row.block_size, size), LINE):
                sum_of_lanes = sum_of_lanes + kept_weights(d, c, j, mask)
        sums[block] = k.reduce_add(sum_of_lanes)
        total += k.f64(sums[block])
    target = k.f64(u) * total
    # the block, then the line, then the token: the last one with a weight, where rounding leaves none
    sum_so_far = k.f64(0)
    before = k.f64(0)
    begin = k.i64(0)
    searching = True
    for block in range(row.blocks):
        if searching and sums[block] > 0:
            before = sum_so_far
            begin = k.i64(block * row.block_size)
            sum_so_far += k.f64(sums[block])
            searching = sum_so_far <= target
    sum_so_far = before
    line = begin
    searching = True
    for j, mask in k.vectors(begin, k.min(begin + row.block_size, size), LINE):
        if searching:
            weight = k.reduce_add(kept_weights(d, c, j, mask))
            if weight > 0:
                before = sum_so_far
                line = k.i64(j)
                sum_so_far += k.f64(weight)
                searching = sum_so_far <= target
    inside = k.iota(k.i64, LINE) + line < size
    lanes.store(0, value=kept_weights(d, c, line, inside))
    sum_so_far = before
    token = line
    searching = True
    for lane in range(LINE):
        weight = lanes[lane]
        if searching and weight > 0:
            token = line + lane
            sum_so_far += k.f64(weight)
            searching = sum_so_far <= target
    return token
