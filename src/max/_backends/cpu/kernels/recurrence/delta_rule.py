"""The gated delta rule (https://arxiv.org/abs/2412.06464) over ragged sequences, with states that are updated in place.

A head has a state ``S [key_dim, value_dim]``. Each token decays it, corrects what it stores for the token's key, and
reads it::

    S = exp(g) · S;   u = beta · (v - Sᵀ k);   S = S + k uᵀ;   out = scale · Sᵀ q

Long runs of tokens are computed in chunks, with products of matrices. With ``D[t, i]``, the decay of the tokens after i
up to t, and ``e[t]``, that of the chunk's tokens up to t::

    u[t] = beta[t] · (v[t] - e[t] · S₀ᵀ k[t] - Σ(i < t) D[t, i] · (k[t] · k[i]) · u[i])        a triangular system
    out[t] = e[t] · S₀ᵀ q[t] + Σ(i <= t) D[t, i] · (q[t] · k[i]) · u[i]
    S = e[last] · S₀ + Σ D[last, i] · k[i] u[i]ᵀ

The values of a token are independent of each other: a chunk is computed for four vectors of them at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.cpu.kernels.recurrence.slots import SlotBatch, check_states, state_views
from max._backends.cpu.kernels.tiles.micro_kernels import multiply_columns
from max._backends.cpu.kernels.tiles.tiling import Matrix, round_up
from max._backends.kernel_call import KernelCall, Operand, view

NORM_EPSILON = 1e-6
"""Added to the sum of squares of queries and keys that are normalized."""

MIN_CHUNK = 8
"""Minimum number of tokens of a chunk; shorter remainders are computed token by token."""

MAX_KEY_ELEMENTS = 512
"""Maximum size of a key."""


class Tokens(NamedTuple):
    """The operands of the tokens of all sequences.

    Args:
        q: `[total, key_heads, key_dim]`.
        keys: The same shape; a key head serves neighboring heads of the values.
        values: `[total, heads, value_dim]`.
        gates: The logarithms of decays, `[total, heads]`.
        rates: beta, `[total, heads]`.
    """

    q: k.Input
    keys: k.Input
    values: k.Input
    gates: k.Input
    rates: k.Input


class Head(NamedTuple):
    """The operands of a task: one head of all tokens.

    Args:
        out: `[total, value_dim]`.
        q: `[total, key_dim]`.
        keys: The same shape.
        values: `[total, value_dim]`.
        gates: The logarithms of decays, `[total]`.
        rates: beta, `[total]`.
        state: `[key_dim, value_dim]`, float32.
    """

    out: Any
    q: Any
    keys: Any
    values: Any
    gates: Any
    rates: Any
    state: Any


class Form(NamedTuple):
    """The compile-time parameters of the rule.

    Args:
        width: Lanes of a vector; a chunk has four times as many tokens, a block of values as many elements.
        height: Rows per pass of a product.
        scale: The factor of queries.
        normalized: Whether queries and keys are divided by their lengths.
    """

    width: int
    height: int
    scale: float
    normalized: bool


class Scratch(NamedTuple):
    """The memory of a worker, float32. A chunk has C tokens, a block of values C elements.

    Args:
        rows: `[2 C, key_dim]`: keys, then queries.
        columns: `[key_dim, C]`: the keys transposed.
        scores: `[2 C, C]`: products of keys with keys, then of queries with keys, with their decays.
        sums: `[2 C, C]`: products of keys, then of queries, with the state.
        state: `[key_dim, C]`: a block of the state.
        updates: `[C, C]`: u of each token.
        decays: `[C]`: D of the last token.
        past_decays: `[C]`: e.
    """

    rows: Any
    columns: Any
    scores: Any
    sums: Any
    state: Any
    updates: Any
    decays: Any
    past_decays: Any


@k.inline
def delta_scratch(key_dim: int, f: Form, ctx: k.Context) -> Scratch:
    """The scratch memory; keys are padded to whole passes of a product."""
    chunk = 4 * f.width  # four vectors of tokens
    padded = round_up(key_dim, f.height)
    return Scratch(
        rows=ctx.scratch(k.f32, (2 * chunk, key_dim)),
        columns=ctx.scratch(k.f32, (padded, chunk)),
        scores=ctx.scratch(k.f32, (2 * chunk, chunk)),
        sums=ctx.scratch(k.f32, (2 * chunk, chunk)),
        state=ctx.scratch(k.f32, (padded, chunk)),
        updates=ctx.scratch(k.f32, (chunk, chunk)),
        decays=ctx.scratch(k.f32, (chunk,)),
        past_decays=ctx.scratch(k.f32, (chunk,)),
    )


@k.inline
def load_row(target: k.View, source: k.View, factor: float, f: Form) -> None:
    """`target = factor · source`, of length `factor` where rows are normalized, in float32."""
    scale = k.f32(factor)
    if f.normalized:
        squares = k.splat(k.f32(0), f.width)
        for j, mask in k.vectors(source.shape[0], f.width):
            x = k.cast(source.load(j, width=f.width, mask=mask), k.f32)
            squares = k.fma(x, x, squares)
        # the epsilon keeps a row of zeros finite
        scale = scale / k.sqrt(k.reduce_add(squares) + NORM_EPSILON)
    for j, mask in k.vectors(source.shape[0], f.width):
        x = k.cast(source.load(j, width=f.width, mask=mask), k.f32)
        target.store(j, value=x * scale, mask=mask)


@k.inline
def step(h: Head, token: k.Integer, memory: Scratch, f: Form) -> None:
    """Computes one token. The state is read twice and written once, a block of values at a time."""
    width, key_dim = f.width, h.keys.shape[1]
    key, query = memory.rows[0], memory.rows[1]
    load_row(key, h.keys[token], 1.0, f)
    load_row(query, h.q[token], f.scale, f)
    decay = k.exp(k.f32(h.gates[token]))
    rate = k.f32(h.rates[token])
    # (S + k uᵀ)ᵀ q = Sᵀ q + (k · q) u: the old state serves
    match = k.f32(0)
    for p in range(key_dim):
        match += key[p] * query[p]
    for j, mask in k.vectors(h.values.shape[1], 2 * width):
        stored = k.splat(k.f32(0), 2 * width)
        read = k.splat(k.f32(0), 2 * width)
        for p in range(key_dim):
            s = h.state.load(p, j, width=2 * width, mask=mask)
            stored = k.fma(s, k.splat(key[p], 2 * width), stored)
            read = k.fma(s, k.splat(query[p], 2 * width), read)
        value = k.cast(h.values.load(token, j, width=2 * width, mask=mask), k.f32)
        # Sᵀ k of the decayed state, as the decay is a scalar
        update = (value - stored * decay) * rate
        for p in range(key_dim):
            s = h.state.load(p, j, width=2 * width, mask=mask) * decay
            h.state.store(p, j, value=k.fma(update, k.splat(key[p], 2 * width), s), mask=mask)
        result = k.fma(update, k.splat(match, 2 * width), read * decay)
        h.out.store(token, j, value=result, mask=mask)


@k.inline
def multiply(c: k.View, a: k.View, b: k.View, accumulate: bool, f: Form) -> None:
    """`c = a b`, or `c + a b`. All have rows of scratch memory; `a` has whole passes of rows, `b` a chunk's columns."""
    flat = c.reshape(c.size)
    for i in range(0, a.shape[0], f.height):
        sums = Matrix(flat[i * c.shape[1] :], c.shape[1])
        multiply_columns(sums, a[i : i + f.height], b, f.height, f.width, accumulate)


@k.inline
def load_chunk(h: Head, first: k.Value, count: k.Integer, memory: Scratch, f: Form) -> None:
    """Loads keys and queries of the chunk's tokens; the rows of missing tokens are 0."""
    chunk, width = memory.updates.shape[0], f.width
    for t in range(count):
        load_row(memory.rows[t], h.keys[first + t], 1.0, f)
        load_row(memory.rows[chunk + t], h.q[first + t], f.scale, f)
    # missing rows take part in the products: stale memory could hold NaN
    for t in range(count, chunk):
        for j, mask in k.vectors(memory.rows.shape[1], width):
            memory.rows.store(t, j, value=k.splat(k.f32(0), width), mask=mask)
            memory.rows.store(chunk + t, j, value=k.splat(k.f32(0), width), mask=mask)
    # the right operand of a product has a row for each element of a key
    for p in range(memory.rows.shape[1]):
        for t in range(chunk):
            memory.columns[p, t] = memory.rows[t, p]


@k.inline
def score_chunk(h: Head, first: k.Value, count: k.Integer, memory: Scratch, f: Form) -> None:
    """Computes the products of keys and queries with the chunk's keys, scaled by the decays between tokens; writes the
    decays to the last token.
    """
    chunk, width = memory.updates.shape[0], f.width
    # [2 C, C]: k · k, then q · k
    multiply(memory.scores, memory.rows, memory.columns[: memory.rows.shape[1]], False, f)
    for j in range(0, chunk, width):
        memory.decays.store(j, value=k.splat(k.f32(0), width))
    # the product of all decays up to t
    total = k.f32(1)
    for t in range(count):
        decay = k.exp(k.f32(h.gates[first + t]))
        total *= decay
        memory.past_decays[t] = total
        # decays of later tokens are 0: causal mask
        for j in range(0, chunk, width):
            memory.decays.store(j, value=memory.decays.load(j, width=width) * decay)
        memory.decays[t] = 1.0
        for j in range(0, chunk, width):
            decays = memory.decays.load(j, width=width)
            for row in (t, chunk + t):  # keys, then queries
                memory.scores.store(row, j, value=memory.scores.load(row, j, width=width) * decays)
    # the update of the state takes keys scaled by their decays to the end of the chunk
    for p in range(memory.rows.shape[1]):
        for j in range(0, chunk, width):
            key = memory.columns.load(p, j, width=width)
            memory.columns.store(p, j, value=key * memory.decays.load(j, width=width))


@k.inline
def solve(
    h: Head, first: k.Value, count: k.Integer, column: k.Value, memory: Scratch, f: Form
) -> None:
    """Solves the triangular system for the updates of a block of values, token by token."""
    width = f.width
    for t in range(count):
        rate, passed = k.f32(h.rates[first + t]), memory.past_decays[t]
        sums = k.tile(k.f32, (4,), width=width)
        # e[t] · S₀ᵀ k[t] of each vector of values
        for n in k.static_range(4):
            sums[n] = memory.sums.load(t, n * width, width=width) * passed
        for i in range(t):
            score = k.splat(memory.scores[t, i], width)
            for n in k.static_range(4):
                update = memory.updates.load(i, n * width, width=width)
                sums[n] = k.fma(score, update, sums[n])
        for n in k.static_range(4):
            at = column + n * width
            mask = k.iota(k.i64, width) + at < h.values.shape[1]
            value = k.cast(h.values.load(first + t, at, width=width, mask=mask), k.f32)
            memory.updates.store(t, n * width, value=(value - sums[n]) * rate)


@k.inline
def advance_block(
    h: Head, first: k.Value, count: k.Integer, column: k.Value, memory: Scratch, f: Form
) -> None:
    """Computes results and state of a block of values of a chunk."""
    width, key_dim = f.width, h.keys.shape[1]
    chunk = memory.updates.shape[0]
    last = memory.past_decays[count - 1]
    for p in range(key_dim):
        for n in k.static_range(4):
            at = column + n * width
            mask = k.iota(k.i64, width) + at < h.values.shape[1]
            memory.state.store(p, n * width, value=h.state.load(p, at, width=width, mask=mask))
    # [2 C, C]: Sᵀ k, then Sᵀ q
    multiply(memory.sums, memory.rows, memory.state[:key_dim], False, f)
    solve(h, first, count, column, memory, f)
    # whole passes of rows: those past the last token are not stored
    results, rows = memory.sums[chunk:], k.ceildiv(count, f.height) * f.height
    for t in range(count):
        for j in range(0, chunk, width):
            results.store(t, j, value=results.load(t, j, width=width) * memory.past_decays[t])
    # scores of later tokens are 0, so that all of a row can be multiplied
    scores = memory.scores[chunk : chunk + rows, :count]
    multiply(results, scores, memory.updates[:count], True, f)
    for t in range(count):
        for n in k.static_range(4):
            at = column + n * width
            mask = k.iota(k.i64, width) + at < h.values.shape[1]
            h.out.store(first + t, at, value=results.load(t, n * width, width=width), mask=mask)
    for p in range(key_dim):
        for j in range(0, chunk, width):
            memory.state.store(p, j, value=memory.state.load(p, j, width=width) * last)
    # columns have the keys' decays to the end of the chunk already
    multiply(memory.state, memory.columns[:, :count], memory.updates[:count], True, f)
    for p in range(key_dim):
        for n in k.static_range(4):
            at = column + n * width
            mask = k.iota(k.i64, width) + at < h.values.shape[1]
            h.state.store(p, at, value=memory.state.load(p, n * width, width=width), mask=mask)


@k.kernel
def gated_delta_rule(
    out: k.Output,
    tokens: Tokens,
    batch: SlotBatch,
    ctx: k.Context,
    *,
    scale: float,
    normalized: bool,
) -> None:
    """`out` `[total, heads, value_dim]` of the rule, and the states after the last token of each sequence.

    The states are `[slots, layers, heads, key_dim, value_dim]`; a sequence of `cache_lengths` 0 begins from zeros,
    whatever its slot holds.
    """
    q, keys, values, gates, rates = tokens
    input_row_offsets, cache_lengths, slots, states, layer_index = batch
    heads, key_heads, key_dim = values.shape[1], keys.shape[1], keys.shape[2]
    total = values.shape[0]
    height = 4 if ctx.target.registers >= 32 else 2
    f = Form(ctx.target.width(k.f32), height, scale, normalized)
    check_states(batch, total, ctx)
    check_size("the result", out.shape[0], total)
    check_size("queries", q.shape[0], total)
    check_size("keys", keys.shape[0], total)
    check_size("decays", gates.shape[0], total)
    check_size("rates", rates.shape[0], total)
    layer = k.i64(layer_index[0])
    memory = delta_scratch(key_dim, f, ctx)
    chunk = 4 * f.width
    for sequence, head in ctx.parallel((slots.shape[0], heads), grain=1):
        begin, end = k.i64(input_row_offsets[sequence]), k.i64(input_row_offsets[sequence + 1])
        # neighboring heads of values share a key head
        key_head = head // (heads // key_heads)
        state = states[k.i64(slots[sequence]), layer, head]
        h = Head(
            out[:, head],
            q[:, key_head],
            keys[:, key_head],
            values[:, head],
            gates[:, head],
            rates[:, head],
            state,
        )
        if end > begin and k.i64(cache_lengths[sequence]) == 0:
            for p in range(key_dim):
                for j, mask in k.vectors(values.shape[2], f.width):
                    state.store(p, j, value=k.splat(k.f32(0), f.width), mask=mask)
        token = begin
        # a remainder too short for a chunk goes token by token
        while end - token >= MIN_CHUNK:
            count = k.min(k.i64(chunk), end - token)
            load_chunk(h, token, count, memory, f)
            score_chunk(h, token, count, memory, f)
            for column in range(0, values.shape[2], chunk):
                advance_block(h, token, count, column, memory, f)
            token += count
        while token < end:
            step(h, token, memory, f)
            token += 1


def _lower_gated_delta(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.gated_delta.ragged`; heads and their sizes must be static."""
    key_dim = operands[1].shape[2]
    if key_dim > MAX_KEY_ELEMENTS:
        raise NotImplementedError(
            f"mo.gated_delta.ragged: keys of {key_dim} elements, expected up to {MAX_KEY_ELEMENTS}"
        )
    rows = (False, True, True)
    args = (
        view("result", 0, results[0], static=rows),
        *(view("operand", i, operands[i], static=rows) for i in range(3)),
        *(view("operand", i, operands[i], static=(False, True)) for i in (3, 4)),
        *state_views(operands, 5),
    )
    params = {
        "scale": float(attributes["scale"]),
        "normalized": bool(attributes["normalized"]),
    }
    return KernelCall(gated_delta_rule, args, params)


LOWERINGS = {"mo.gated_delta.ragged": _lower_gated_delta}
