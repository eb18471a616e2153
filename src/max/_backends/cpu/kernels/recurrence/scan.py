"""Selective scans of state-space models over ragged sequences: those of Mamba and Mamba 2.

A task is a sequence and a head (Mamba 2) or a vector of channels (Mamba). It goes chunk by chunk of `CHUNK` tokens. For
each tile of states, which stays in registers through the chunk, every token decays the tile, adds the token's input to
it, and adds the tile's part to the token's sums::

    chunk → tile of states → token:    tile = decay · tile + input ⊗ b;    sums[token] += c · tile

A decoding step is a chunk of one token.

Register budget of Mamba 2: `ROWS` × 4 vectors of states, 4 of inputs and 4 of sums: 24 of 32 registers (AVX-512, NEON);
`ROWS` × 2, 2 and 2: 12 of 16 (AVX2); then the decay and broadcast elements of b and c. Mamba: `ROWS` vectors of states
and as many of rates. Cache budget: inputs and sums of a chunk, 2 × `CHUNK` × channels × 4 bytes (16 KB for heads of
64), stay in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.cpu.kernels.recurrence.slots import SlotBatch, check_states, state_views
from max._backends.kernel_call import KernelCall, Operand, view

CHUNK = 32
"""Tokens that a tile of states processes between load and store."""
ROWS = 4
"""States of a tile; their inputs are scalars of B and C."""


class ScanOperands(NamedTuple):
    """The operands of a scan besides the batch and its states; each kernel gives their shapes.

    Args:
        x: The inputs.
        dt: The raw steps.
        a: The rates of decay, negative.
        b: What an input adds to the states.
        c: What the states add to a result.
        d: What an input adds to its result.
        dt_bias: Added to the raw steps.
    """

    x: k.Input
    dt: k.Input
    a: k.Input
    b: k.Input
    c: k.Input
    d: k.Input
    dt_bias: k.Input


class Chunk(NamedTuple):
    """A chunk of tokens of one sequence, for the channels of a task.

    Args:
        decays: What a state is multiplied by, `[CHUNK, 1]`; in Mamba the exponents' step, `[CHUNK, channels]`.
        inputs: Step times x, `[CHUNK, channels]`.
        sums: The results so far, `[CHUNK, channels]`.
        b: `[tokens, states]` from the chunk's first token on.
        c: The same.
        count: The tokens.
    """

    decays: Any
    inputs: Any
    sums: Any
    b: Any
    c: Any
    count: Any


@k.inline
def softplus(x: k.Value) -> Any:
    """`log(1 + exp(x))`; `x` above 20, where both are equal in float32."""
    # exp of a greater number could overflow
    return k.select(x > 20.0, x, k.log1p(k.exp(k.min(x, k.f32(20.0)))))


@k.inline
def step_size(raw: k.Value, low: float, high: float) -> Any:
    """The step of a token: softplus, clamped."""
    return k.min(k.max(softplus(raw), k.f32(low)), k.f32(high))


@k.inline
def clear(rows: k.View, width: int) -> None:
    """Sets a matrix to 0."""
    zero = k.splat(k.f32(0), width)
    for n in range(rows.shape[0]):
        for p, mask in k.vectors(rows.shape[1], width):
            rows.store(n, p, value=zero, mask=mask)


@k.inline
def ssd_tile(
    chunk: Chunk,
    states: k.View,
    n: k.Value,
    p: k.Value,
    mask: k.Mask | None,
    rows: int,
    vectors: int,
    width: int,
) -> None:
    """Moves the states `n … n + rows` of `vectors` vectors of channels from `p` on through a chunk.

    Args:
        chunk: The chunk.
        states: `[states, channels]`.
        n: The first state.
        p: The first channel.
        mask: The channels that exist; None: all.
        rows: States of the tile.
        vectors: Vectors of the tile.
        width: Lanes.
    """
    tile = k.tile(k.f32, (rows, vectors), width=width)
    # the loops use different variables: a variable of two loops would be a run-time value
    for i in k.static_range(rows):
        for j in k.static_range(vectors):
            tile[i, j] = k.cast(states.load(n + i, p + j * width, width=width, mask=mask), k.f32)
    sums = k.tile(k.f32, (vectors,), width=width)
    for t in range(chunk.count):
        # Mamba 2: one decay for all states of a head and token
        decay = k.splat(chunk.decays[t, 0], width)
        inputs = [
            chunk.inputs.load(t, p + y * width, width=width, mask=mask)
            for y in k.static_range(vectors)
        ]
        for u in k.static_range(vectors):
            sums[u] = chunk.sums.load(t, p + u * width, width=width, mask=mask)
        for r in k.static_range(rows):
            b = k.splat(k.cast(chunk.b[t, n + r], k.f32), width)
            c = k.splat(k.cast(chunk.c[t, n + r], k.f32), width)
            for v in k.static_range(vectors):
                # the states stay in registers through the chunk: memory has them once per chunk, not once per token
                moved = k.fma(inputs[v], b, tile[r, v] * decay)
                tile[r, v] = moved
                sums[v] = k.fma(moved, c, sums[v])
        for w in k.static_range(vectors):
            chunk.sums.store(t, p + w * width, value=sums[w], mask=mask)
    for last in k.static_range(rows):
        for z in k.static_range(vectors):
            states.store(n + last, p + z * width, value=tile[last, z], mask=mask)


@k.inline
def ssd_rows(chunk: Chunk, states: k.View, n: k.Value, rows: int, vectors: int, width: int) -> None:
    """`ssd_tile` over all channels."""
    size, block = states.shape[1], vectors * width
    for p in range(0, size // block * block, block):
        ssd_tile(chunk, states, n, p, None, rows, vectors, width)
    # the channels behind the last block, one vector at a time
    for p, mask in k.vectors(size // block * block, size, width):
        ssd_tile(chunk, states, n, p, mask, rows, 1, width)


@k.kernel
def ssd(
    out: k.Output,
    operands: ScanOperands,
    batch: SlotBatch,
    ctx: k.Context,
    *,
    low: float,
    high: float,
) -> None:
    """`h = exp(step * a) * h + step * x ⊗ b`, `out = h · c + d * x` for each head; step is the clamped softplus of `dt
    + dt_bias`.

    `x` and `out` are `[total, heads, size]`, `dt` `[total, heads]`, `b` and `c` `[total, groups, states]`, `a`, `d` and
    `dt_bias` `[heads]`, a state `[heads, states, size]`.
    """
    width = ctx.target.width(k.f32)
    vectors = 4 if ctx.target.registers >= 32 else 2
    x, dt, a, b, c, d, dt_bias = operands
    heads, size, groups, states = x.shape[1], x.shape[2], b.shape[1], b.shape[2]
    input_row_offsets, cache_lengths, slots, state_buffer, layer_index = batch
    check_states(batch, x.shape[0], ctx)
    for view_of_rows in (out, dt, b, c):
        check_size("the rows of an operand", view_of_rows.shape[0], x.shape[0])
    for by_head in (a, d, dt_bias):
        check_size("a vector of heads", by_head.shape[0], heads)
    layer = k.i64(layer_index[0])
    for sequence, head in ctx.parallel((slots.shape[0], heads)):
        state = state_buffer[k.i64(slots[sequence]), layer, head]
        # the slot of a new sequence may hold another one's state
        if cache_lengths[sequence] == 0:
            clear(state, width)
        decays = ctx.scratch(k.f32, (CHUNK, 1))  # exp(step a)
        inputs = ctx.scratch(k.f32, (CHUNK, size))
        sums = ctx.scratch(k.f32, (CHUNK, size))
        # neighboring heads share b and c
        group = head // (heads // groups)
        rate, skip = k.cast(a[head], k.f32), k.cast(d[head], k.f32)
        shift = k.cast(dt_bias[head], k.f32)
        end = k.i64(input_row_offsets[sequence + 1])
        first = k.i64(input_row_offsets[sequence])
        while first < end:
            count = k.min(end - first, k.i64(CHUNK))
            for t in range(count):
                step = step_size(k.cast(dt[first + t, head], k.f32) + shift, low, high)
                decays[t, 0] = k.exp(step * rate)
                for p, mask in k.vectors(size, width):
                    value = k.cast(x.load(first + t, head, p, width=width, mask=mask), k.f32)
                    # step · x, what the states take
                    inputs.store(t, p, value=value * step, mask=mask)
                    # d · x, what the result begins with
                    sums.store(t, p, value=value * skip, mask=mask)
            chunk = Chunk(decays, inputs, sums, b[first:, group], c[first:, group], count)
            for n in range(0, states // ROWS * ROWS, ROWS):
                ssd_rows(chunk, state, n, ROWS, vectors, width)
            # states that make no whole tile
            for n in range(states // ROWS * ROWS, states):
                ssd_rows(chunk, state, n, 1, vectors, width)
            for t in range(count):
                for p, mask in k.vectors(size, width):
                    value = sums.load(t, p, width=width, mask=mask)
                    out.store(first + t, head, p, value=value, mask=mask)
            first += count


@k.inline
def scan_tile(
    chunk: Chunk,
    a: k.View,
    states: k.View,
    n: k.Value,
    p: k.Integer,
    mask: k.Mask | None,
    rows: int,
    width: int,
) -> None:
    """Moves the states `n … n + rows` of a vector of channels from `p` on through a chunk.

    Args:
        chunk: The chunk, of these channels only.
        a: `[states, channels]`.
        states: The same.
        n: The first state.
        p: The first channel.
        mask: The channels that exist; None: all.
        rows: States of the tile.
        width: Lanes.
    """
    tile = k.tile(k.f32, (rows,), width=width)
    for i in k.static_range(rows):
        tile[i] = k.cast(states.load(n + i, p, width=width, mask=mask), k.f32)
    # Mamba 1: a rate for each state and channel, so that a token takes an exponential for each
    rates = [k.cast(a.load(n + j, p, width=width, mask=mask), k.f32) for j in k.static_range(rows)]
    for t in range(chunk.count):
        step, inputs = chunk.decays.load(t, 0, width=width), chunk.inputs.load(t, 0, width=width)
        total = chunk.sums.load(t, 0, width=width)
        for r in k.static_range(rows):
            b = k.splat(k.cast(chunk.b[t, n + r], k.f32), width)
            c = k.splat(k.cast(chunk.c[t, n + r], k.f32), width)
            # exp(step · a), a for each state and channel
            moved = k.fma(inputs, b, tile[r] * k.exp(step * rates[r]))
            tile[r] = moved
            total = k.fma(moved, c, total)
        chunk.sums.store(t, 0, value=total)
    for last in k.static_range(rows):
        states.store(n + last, p, value=tile[last], mask=mask)


@k.kernel
def selective_scan(
    out: k.Output,
    operands: ScanOperands,
    batch: SlotBatch,
    ctx: k.Context,
    *,
    low: float,
    high: float,
) -> None:
    """`h = exp(step * a) * h + step * x * b`, `out = sum over the states of h * c, + d * x` for each channel.

    `x`, `dt` and `out` are `[total, channels]`, `b` and `c` `[total, states]`, `a` and a state `[states, channels]`,
    `d` and `dt_bias` `[channels]`; step is as in `ssd`.
    """
    width = ctx.target.width(k.f32)
    x, dt, a, b, c, d, dt_bias = operands
    channels, states = x.shape[1], a.shape[0]
    input_row_offsets, cache_lengths, slots, state_buffer, layer_index = batch
    check_states(batch, x.shape[0], ctx)
    for view_of_rows in (out, dt, b, c):
        check_size("the rows of an operand", view_of_rows.shape[0], x.shape[0])
    layer = k.i64(layer_index[0])
    for sequence, part in ctx.parallel((slots.shape[0], (channels + width - 1) // width)):
        state = state_buffer[k.i64(slots[sequence]), layer]
        steps = ctx.scratch(k.f32, (CHUNK, width))
        inputs = ctx.scratch(k.f32, (CHUNK, width))
        sums = ctx.scratch(k.f32, (CHUNK, width))
        for p, mask in k.vectors(part * width, k.min(channels, (part + 1) * width), width):
            if cache_lengths[sequence] == 0:
                zero = k.splat(k.f32(0), width)
                for n in range(states):
                    state.store(n, p, value=zero, mask=mask)
            shift = k.cast(dt_bias.load(p, width=width, mask=mask), k.f32)
            skip = k.cast(d.load(p, width=width, mask=mask), k.f32)
            end = k.i64(input_row_offsets[sequence + 1])
            first = k.i64(input_row_offsets[sequence])
            while first < end:
                count = k.min(end - first, k.i64(CHUNK))
                for t in range(count):
                    raw = k.cast(dt.load(first + t, p, width=width, mask=mask), k.f32)
                    value = k.cast(x.load(first + t, p, width=width, mask=mask), k.f32)
                    step = step_size(raw + shift, low, high)
                    steps.store(t, 0, value=step)
                    inputs.store(t, 0, value=step * value)
                    sums.store(t, 0, value=skip * value)
                # [CHUNK, width] of these channels only
                chunk = Chunk(steps, inputs, sums, b[first:], c[first:], count)
                for n in range(0, states // ROWS * ROWS, ROWS):
                    scan_tile(chunk, a, state, n, p, mask, ROWS, width)
                for n in range(states // ROWS * ROWS, states):
                    scan_tile(chunk, a, state, n, p, mask, 1, width)
                for t in range(count):
                    out.store(first + t, p, value=sums.load(t, 0, width=width), mask=mask)
                first += count


def _arguments(operands: Sequence[Operand], results: Sequence[Operand]) -> tuple[Any, ...]:
    """The views of result, operands and states."""
    rows = (0, 1, 3, 4)  # x, dt, b and c have a row for each token
    return (
        view("result", 0, results[0], static=(False, *(True for _ in results[0].shape[1:]))),
        *(
            view("operand", i, one, static=(i not in rows, *(True for _ in one.shape[1:])))
            for i, one in enumerate(operands[:7])
        ),
        *state_views(operands, 7),
    )


def _limits(attributes: Mapping[str, Any]) -> dict[str, float]:
    return {"low": float(attributes["low"]), "high": float(attributes["high"])}


def _lower_ssd(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.ssd.ragged`."""
    return KernelCall(ssd, _arguments(operands, results), _limits(attributes))


def _lower_scan(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.selective_scan.ragged`."""
    return KernelCall(selective_scan, _arguments(operands, results), _limits(attributes))


LOWERINGS = {"mo.ssd.ragged": _lower_ssd, "mo.selective_scan.ragged": _lower_scan}
