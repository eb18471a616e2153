"""The tokens of a row that may be among the best ones, gathered in memory, and cuts of them.

Candidates are in order of index. A cut is found by bisection over the bits of the logit and does not sort them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.online_softmax import NEGATIVE_INFINITY
from max._backends.cpu.kernels.generation.logit_rows import (
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

CAPACITY = 8192
"""The maximum number of candidates."""
MOST_KEPT = 2048
"""The maximum `top_k` whose tokens are gathered: when the memory is full, half of it is free after a cut."""


class Candidates(NamedTuple):
    """Memory for candidates, each `CAPACITY + LINE` elements.

    Args:
        logits: Their logits.
        places: Their indices in the row.
        weights: Their weights.
    """

    logits: Any
    places: Any
    weights: Any


@k.inline
def measure_above(logits: k.View, weights: k.View | None, lines: k.Integer, bound: k.Value) -> Any:
    """The sum of the weights (the number, without weights) of the logits above a bound.

    It never grows with the bound: each lane adds its weights in one order.
    """
    number = k.splat(k.i32(0), LINE)
    total = k.splat(k.f32(0), LINE)
    zeros = k.splat(k.f32(0), LINE)
    for j, mask in k.vectors(lines * LINE, LINE):
        inside = logits.load(j, width=LINE, mask=mask) > bound
        if weights is None:
            number = number + k.cast(inside, k.i32)
        else:
            total = total + k.select(inside, weights.load(j, width=LINE, mask=mask), zeros)
    if weights is None:
        return k.f64(k.reduce_add(number))
    else:
        return k.f64(k.reduce_add(total))


@k.inline
def bound_of(
    measure: Callable[[Any], Any],
    lowest: k.Value,
    highest: k.Value,
    goal: k.Value,
    enough: k.Value,
) -> Any:
    """A bound above which a measure is at least `goal`: the greatest one, or one with at most `enough`.

    Args:
        measure: The measure of the logits above a bound.
        lowest: A bound above which the measure is at least `goal`, or the result if there is none.
        highest: The greatest logit, above `lowest`.
        goal: The measure that is needed.
        enough: The measure that ends the search.
    """
    low = order_key(lowest)
    high = order_key(highest) - 1
    reached = enough + 1
    while low < high and reached > enough:
        # rounded up, without overflow
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        found = measure(from_order_key(middle))
        if found >= goal:
            low = middle
            reached = found
        else:
            high = middle - 1
    return from_order_key(low)


@k.inline
def next_above(bound: k.Value) -> Any:
    """The least float above a bound, or the 0 of the other sign."""
    return from_order_key(order_key(bound) + 1)


@k.inline
def pad_line(c: Candidates, count: k.Integer) -> Any:
    """Fills the last line up with -inf, in up to one line behind it; returns the number of lines."""
    c.logits.store(count, value=k.splat(k.f32(NEGATIVE_INFINITY), LINE))
    return (count + (LINE - 1)) // LINE


@k.inline
def keep_first(c: Candidates, count: k.Integer, threshold: k.Value, ties: k.Value) -> Any:
    """Keeps the candidates above a threshold, and the first `ties` of those that equal it; returns their number."""
    kept = k.i64(0)
    remaining = k.i64(ties)
    for i in range(count):
        logit = c.logits[i]
        place = c.places[i]
        weight = c.weights[i]
        # overwritten by the next one unless it is kept
        c.logits[kept] = logit
        c.places[kept] = place
        c.weights[kept] = weight
        tied = logit == threshold
        kept += 1 if logit > threshold or (tied and remaining > 0) else 0
        remaining -= 1 if tied else 0
    return kept


@k.inline
def keep_best_candidates(
    c: Candidates, count: k.Integer, number: k.Integer, lowest: k.Value, peak: k.Value
) -> Any:
    """Keeps the `number` best candidates, of equal ones the first; returns their number and the least logit."""
    lines = pad_line(c, count)
    needed = k.f64(number)
    threshold = next_above(
        bound_of(
            lambda bound: measure_above(c.logits, None, lines, bound),  # pyright: ignore[reportUnknownLambdaType]
            lowest,
            peak,
            needed,
            k.f64(-1),
        )
    )
    above = measure_above(c.logits, None, lines, threshold)
    return keep_first(c, count, threshold, k.i64(needed - above)), threshold


@k.inline
def gather_candidates(
    row: LogitRow,
    c: Candidates,
    lowest: k.Value,
    highest: k.Value,
    number: k.Integer,
    peak: k.Value,
) -> Any:
    """Gathers the tokens whose logits are above `lowest`, at most `highest` and among the `number` best of these.

    Args:
        row: The logits.
        c: Receives them.
        lowest: The bound below them.
        highest: The greatest logit that is gathered.
        number: How many of them are kept at most, `MOST_KEPT` or less; or `CAPACITY`, if it is known that there are no
            more.
        peak: The greatest logit of the row.

    Returns:
        Their number.
    """
    count = k.i64(0)
    bound = k.f32(lowest)
    for block in range(row.blocks):
        if block_top(row, block) > bound:
            start = block * row.block_size
            for j, mask in k.vectors(
                start, k.min(start + row.block_size, row.logits.shape[0]), LINE
            ):
                logits = load_logits(row, j, mask, LINE)
                bits = k.bitcast((logits > bound) & (logits <= highest), k.u64)
                if bits != 0:
                    if count > CAPACITY - LINE:
                        # of later equal logits none is better
                        count, bound = keep_best_candidates(
                            c, count, k.min(number, MOST_KEPT), lowest, peak
                        )
                        bits = k.bitcast((logits > bound) & (logits <= highest), k.u64)
                    # behind the candidates of now: a run-time index into a vector
                    c.weights.store(CAPACITY, value=logits)
                    while bits != 0:
                        k.brief()
                        lane = k.i64(k.count_trailing_zeros(bits))
                        c.logits[count] = c.weights[CAPACITY + lane]
                        c.places[count] = k.i32(k.i64(j) + lane)
                        count += 1
                        bits = bits & (bits - 1)
    if count > number:
        count, bound = keep_best_candidates(c, count, number, lowest, peak)
    return count


@k.inline
def weigh_candidates(d: Distribution, c: Candidates, count: k.Integer) -> Any:
    """Writes the weights of candidates; returns the number of lines."""
    lines = pad_line(c, count)
    for j, mask in k.vectors(lines * LINE, LINE):
        c.weights.store(
            j, value=token_weights(c.logits.load(j, width=LINE, mask=mask), d), mask=mask
        )
    return lines


@k.inline
def mass_cut(
    d: Distribution,
    c: Candidates,
    lines: k.Integer,
    lowest: k.Value,
    highest: k.Value,
    mass: k.Value,
) -> Any:
    """The greatest logit that is kept if the best candidates are kept until their weights sum to `mass`, and how many
    of those that equal it are kept, at least one.
    """
    threshold = next_above(
        bound_of(
            lambda bound: measure_above(c.logits, c.weights, lines, bound),  # pyright: ignore[reportUnknownLambdaType]
            lowest,
            highest,
            mass,
            k.f64(-1),
        )
    )
    above = measure_above(c.logits, c.weights, lines, threshold)
    return threshold, ties_of_mass(d, threshold, mass - above)


@k.inline
def ties_of_mass(d: Distribution, threshold: k.Value, mass: k.Value) -> Any:
    """How many tokens with the same logit have at least `mass`, at least one."""
    weight = k.f64(weight_of(threshold, d))
    # of equal logits as many as the mass still needs
    return k.max(k.i64(k.ceil(mass / weight) if weight > 0 else k.f64(1)), 1)


@k.inline
def drawn_candidate(c: Candidates, count: k.Integer, min_weight: k.Value, u: k.Value) -> Any:
    """The first candidate at which the running sum of weights exceeds `u` times their total; those below `min_weight`
    have none.
    """
    total = k.f64(0)
    for i in range(count):
        total += k.f64(c.weights[i]) if c.weights[i] >= min_weight else k.f64(0)
    target = k.f64(u) * total
    sum_so_far = k.f64(0)
    token = k.i64(0)
    searching = True
    for i in range(count):
        weight = c.weights[i]
        if searching and weight > 0 and weight >= min_weight:
            sum_so_far += k.f64(weight)
            token = k.i64(c.places[i])
            searching = sum_so_far <= target
    return token
