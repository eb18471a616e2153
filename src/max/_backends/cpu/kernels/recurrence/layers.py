"""LSTM, GRU and plain recurrent layers: a whole sequence in one launch, both directions side by side.

A task is a block of 16 units of one direction, for all sequences. Workers keep their tasks through all steps, so that
their part of the weights stays in their L2 cache. They meet after each step, as the next one reads whole states; two
workers that have a direction each need not::

    step → task → rows of sequences → element of the state:    sums[row, gate] += weight[element, gate] · state[row]

States alternate between two buffers, padded to whole blocks with zeros. Register budget: rows × gates vectors of sums
(16 to 24 of 32 registers, 8 of 16; of many rows half of the gates at a time), the gates' weights, an element. One row
has `UNROLL` sums for each gate, whose additions would wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.cpu.kernels.recurrence.cells import (
    Form,
    Gru,
    Lstm,
    Plain,
    Units,
    activate_gate,
    gru_candidate_cell,
    gru_cell,
    lstm_cell,
    rnn_cell,
)
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType

UNITS = 16
"""The units of a block, as the ops have it."""
UNROLL = 4
"""The sums of a gate for a single row."""


class Place(NamedTuple):
    """The units and rows of a step that are computed at once.

    Args:
        d: The direction.
        block: The block of units.
        lane: The first unit in the block.
        mask: The units that exist; None: all.
        row: The first sequence.
        number: The step.
        rows: Sequences (compile time).
        width: Lanes.
        registers: Those that sums may take.
    """

    d: Any
    block: Any
    lane: Any
    mask: Any
    row: Any
    number: Any
    rows: int
    width: int
    registers: int


def groups_of(gates: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    """The gates whose sums are in registers together: up to `most`, in even parts."""
    parts = -(-len(gates) // max(most, 1))
    size = -(-len(gates) // parts)
    return tuple(gates[i : i + size] for i in range(0, len(gates), size))


@k.inline
def gate_sums(state: k.View, weight: k.View, place: Place, gates: tuple[int, ...]) -> Any:
    """The products of states `[batch, elements]` with the weights `[elements, gates, UNITS]` of a block: a tile `[rows,
    gates]`."""
    rows, width = place.rows, place.width
    unroll = UNROLL if rows == 1 else 1
    totals = k.tile(k.f32, (rows, len(gates)), width=width)
    # a single row has room for the sums of all gates
    for group in groups_of(gates, len(gates) if rows == 1 else place.registers // rows):
        sums = k.tile(k.f32, (rows, unroll, len(group)), width=width, fill=0.0)
        # the elements are padded to whole blocks, a multiple of `unroll`
        for p in range(0, weight.shape[0], unroll):
            for u in k.static_range(unroll):
                loads = [weight.load(p + u, gate, place.lane, width=width) for gate in group]
                for r in k.static_range(rows):
                    value = k.splat(state[place.row + r, p + u], width)
                    for g in k.static_range(len(group)):
                        sums[r, u, g] = k.fma(loads[g], value, sums[r, u, g])
        for i in k.static_range(rows):
            for j in k.static_range(len(group)):
                total = sums[i, 0, j]
                for more in k.static_range(unroll - 1):
                    total = total + sums[i, more + 1, j]
                totals[i, group[j] - gates[0]] = total
    return totals


@k.inline
def end_of(lengths: Any, row: k.Integer, length: k.Value) -> Any:
    """Where a sequence ends."""
    return k.max(k.min(k.i64(lengths[row]), length), k.i64(0))


@k.inline
def time_of(place: Place, end: k.Value, direction: str) -> Any:
    """The position in a sequence that an active step reads; a backward direction reads from the end."""
    # the first of the directions that runs backward
    first_backward = {"bidirectional": 1, "reverse": 0, "forward": 2}[direction]
    return k.select(place.d >= first_backward, end - 1 - place.number, k.i64(place.number))


class Phase(NamedTuple):
    """What the workers of a direction compute between two meetings.

    Args:
        update: Computes a place: `step_rows`, or `gru_gates`.
        cell: The formula of the layer, for `step_rows`.
        gates: The gates of which it gets the products and the inputs.
        outs: The outputs, and what else is written or read.
        read: What the weights are multiplied by; None: the states of the last step.
    """

    update: Any
    cell: Any
    gates: tuple[int, ...]
    outs: tuple[Any, ...]
    read: Any


@k.inline
def step_rows(phase: Phase, states: tuple[Any, Any], x: Any, form: Form, place: Place) -> None:
    """A step of a place: `cell(outs, sums, inputs, source, x, form, units)` is the state of a row.

    Args:
        phase: The phase.
        states: The states of the last step, and those of this one.
        x: The operands.
        form: The form.
        place: The units and rows.
    """
    gates, outs, (source, target) = phase.gates, phase.outs, states
    y, read = outs[0], source if phase.read is None else phase.read
    d, width, mask = place.d, place.width, place.mask
    sums = gate_sums(read[d], x.weight[d, place.block], place, gates)
    at = place.block * UNITS + place.lane
    for r in k.static_range(place.rows):
        row = place.row + r
        end = end_of(x.lengths, row, x.gates.shape[0])
        if place.number < end:
            time = time_of(place, end, form.direction)
            inputs = [x.gates.load(time, row, d, g, at, width=width, mask=mask) for g in gates]
            products = [sums[r, i] for i in k.static_range(len(gates))]
            units = Units(d, row, at, width, mask)
            state = phase.cell(outs, products, inputs, source, x, form, units)
            target.store(d, row, at, value=state, mask=mask)
            y.store(time, d, row, at, value=state, mask=mask)
        else:
            # behind the end of a sequence its state stays, its output is 0
            old = source.load(d, row, at, width=width, mask=mask)
            target.store(d, row, at, value=old, mask=mask)
            zero = k.splat(k.f32(0), width)
            y.store(place.number, d, row, at, value=zero, mask=mask)


@k.inline
def gru_gates(phase: Phase, states: tuple[Any, Any], x: Gru, form: Form, place: Place) -> None:
    """The gates of a GRU whose reset gate scales the state; `outs` are the scaled states, and the update gates."""
    (scaled, updates), source = phase.outs, states[0]
    d, width, mask = place.d, place.width, place.mask
    sums = gate_sums(source[d], x.weight[d, place.block], place, (0, 1))
    at = place.block * UNITS + place.lane
    for r in k.static_range(place.rows):
        row = place.row + r
        end = end_of(x.lengths, row, x.gates.shape[0])
        # past its end a sequence computes gates that `step_rows` ignores: any position is fine
        time = k.max(k.min(time_of(place, end, form.direction), x.gates.shape[0] - 1), 0)
        parts = [
            x.gates.load(time, row, d, g, at, width=width, mask=mask) for g in k.static_range(2)
        ]
        update = activate_gate(parts[0] + sums[r, 0], form.gate, form.clip)
        reset = activate_gate(parts[1] + sums[r, 1], form.gate, form.clip)
        old = source.load(d, row, at, width=width, mask=mask)
        updates.store(d, row, at, value=update, mask=mask)
        scaled.store(d, row, at, value=reset * old, mask=mask)


@k.inline
def each_place(
    batch: Any,
    num_units: int,
    number: k.Value,
    states: Any,
    ctx: k.Context,
    phase: Phase,
    x: Any,
    form: Form,
) -> None:
    """Updates the units of this worker.

    Args:
        batch: The directions that are computed now, the sequences, and the first of these directions.
        num_units: The units.
        number: The step.
        states: Two buffers of states, which take turns.
        ctx: The context.
        phase: The phase.
        x: The operands.
        form: The form.
    """
    source, target = states[number % 2], states[1 - number % 2]
    width = ctx.target.width(k.f32)
    registers = 24 if ctx.target.registers >= 32 else 8
    many, few = (8, 4) if ctx.target.registers >= 32 else (4, 2)
    directions, blocks = batch[0], (num_units + UNITS - 1) // UNITS
    tasks, workers = directions * blocks, ctx.num_workers
    # the same tasks in each step: the worker's weights stay in its L2 cache
    for task in range(ctx.worker * tasks // workers, (ctx.worker + 1) * tasks // workers):
        d, block = batch[2] + task // blocks, task % blocks
        for lane in k.static_range(0, UNITS, width):
            left = num_units - block * UNITS - lane
            mask = None
            if num_units % UNITS:
                mask = k.iota(k.i64, width) < left
            first, second = batch[1] // many * many, batch[1] // few * few
            for begin, end, rows in ((0, first, many), (first, second, few), (second, batch[1], 1)):
                for row in range(begin, end, rows):
                    place = Place(d, block, lane, mask, row, number, rows, width, registers)
                    phase.update(phase, (source, target), x, form, place)


@k.inline
def fill_states(target: k.View, source: k.View, ctx: k.Context) -> None:
    """Copies states `[directions, batch, hidden]`, and sets what pads them in `target` to 0; workers share the rows."""
    width = ctx.target.width(k.f32)
    batch = source.shape[1]
    for row in range(source.shape[0] * batch):
        if row % ctx.num_workers == ctx.worker:
            for j, mask in k.vectors(target.shape[2], width):
                zero = k.splat(k.f32(0), width)
                target.store(row // batch, row % batch, j, value=zero, mask=mask)
            for i, some in k.vectors(k.min(source.shape[2], target.shape[2]), width):
                value = source.load(row // batch, row % batch, i, width=width, mask=some)
                target.store(row // batch, row % batch, i, value=value, mask=some)


@k.inline
def check_layer(y: k.View, final: k.View, x: Any) -> None:
    """Raises where sizes of the batch or the length differ."""
    check_size("the outputs", y.shape[0], x.gates.shape[0])
    for size in (y.shape[2], final.shape[1], x.state.shape[1], x.lengths.shape[0]):
        check_size("the batch", size, x.gates.shape[1])


@k.inline
def run_steps(
    final: k.View, x: Any, states: Any, ctx: k.Context, phases: tuple[Phase, ...], form: Form
) -> None:
    """Runs all steps, and copies the last states.

    Args:
        final: The last states.
        x: The operands.
        states: Two buffers of states, which take turns, and others of the phases.
        ctx: The context.
        phases: The phases of a step; the workers of a direction meet after each.
        form: The form.
    """
    batch, hidden = (x.state.shape[0], x.gates.shape[1]), x.gates.shape[4]
    ctx.barrier()  # the states have been written by all workers
    # workers that have whole directions need not meet; the L2 cache of one holds the weights of one direction at a time
    whole = batch[0] % ctx.num_workers == 0
    together = k.select(whole, ctx.num_workers, batch[0])
    for turn in range(batch[0] // together):
        for number in range(x.gates.shape[0]):
            for phase in phases:
                here = (together, batch[1], turn * together)
                each_place(here, hidden, number, states, ctx, phase, x, form)
                if not whole:
                    ctx.barrier()
    ctx.barrier()
    fill_states(final, states[x.gates.shape[0] % 2], ctx)


@k.kernel
def lstm(
    y: k.Output,
    final: k.Output,
    memory: k.Output,
    x: Lstm,
    states: k.InOut,
    ctx: k.Context,
    *,
    form: Form,
) -> None:
    """The outputs, the last states and memories of a layer; see `mo.lstm`. `states` are two buffers of states."""
    check_layer(y, final, x)
    check_size("the batch", x.memory.shape[1], x.gates.shape[1])
    fill_states(states[0], x.state, ctx)
    # the second one too: its padding is read as well
    fill_states(states[1], x.state, ctx)
    fill_states(memory, x.memory, ctx)
    run_steps(
        final, x, states, ctx, (Phase(step_rows, lstm_cell, (0, 1, 2, 3), (y, memory), None),), form
    )


@k.kernel
def rnn(
    y: k.Output, final: k.Output, x: Plain, states: k.InOut, ctx: k.Context, *, form: Form
) -> None:
    """The outputs and the last states of a layer; see `mo.rnn`. `states` are two buffers of states."""
    check_layer(y, final, x)
    fill_states(states[0], x.state, ctx)
    fill_states(states[1], x.state, ctx)
    run_steps(final, x, states, ctx, (Phase(step_rows, rnn_cell, (0,), (y,), None),), form)


@k.kernel
def gru(
    y: k.Output, final: k.Output, x: Gru, states: k.InOut, ctx: k.Context, *, form: Form
) -> None:
    """The outputs and the last states of a layer; see `mo.gru`.

    `states` are two buffers of states; then one of states times the reset gate, and one of update gates.
    """
    check_layer(y, final, x)
    for buffer in k.static_range(4):
        # the padding of all of them is 0
        fill_states(states[buffer], x.state, ctx)
    scaled, updates = states[2], states[3]
    if form.reset_after:
        run_steps(final, x, states, ctx, (Phase(step_rows, gru_cell, (0, 1, 2), (y,), None),), form)
    else:
        gates = Phase(gru_gates, None, (0, 1), (scaled, updates), None)
        candidates = Phase(step_rows, gru_candidate_cell, (2,), (y, updates), scaled)
        run_steps(final, x, states, ctx, (gates, candidates), form)


def _lowering(kernel: Any, buffers: int) -> Any:
    def lower(
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: k.Target,
    ) -> KernelCall:
        """The call for a layer: directions and hidden units are static, lengths and batches are not."""
        _, batch, directions, _, hidden = operands[0].shape
        padded = -(-hidden // UNITS) * UNITS
        states = Workspace(DType.float32, (buffers, directions, batch, padded))
        args = (
            view("result", 0, results[0], static=(False, True, False, True)),
            *(
                view("result", i, one, static=(True, False, True))
                for i, one in enumerate(results[1:], 1)
            ),
            view("operand", 0, operands[0], static=(False, False, True, True, True)),
            *(
                view("operand", i, one, static=_static(one, i == 1))
                for i, one in enumerate(operands[1:], 1)
            ),
            view("workspace", 0, states, static=(True, True, False, True)),
        )
        form = Form(
            attributes["direction"], float(attributes["clip"]),
            attributes.get("gate", "sigmoid"), attributes.get("candidate", "tanh"),
            attributes.get("output", "tanh"), bool(attributes.get("coupled", False)),
            bool(attributes.get("looks", False)), bool(attributes.get("reset_after", False)),
        )  # fmt: skip
        return KernelCall(kernel, args, {"form": form}, workspaces=(states,))

    return lower


def _static(operand: Operand, is_weight: bool) -> tuple[bool, ...]:
    """States have the batch as their second axis, lengths as their only one."""
    rank = len(operand.shape)
    if is_weight or rank == 2:
        return (True,) * rank
    if rank == 1:
        return (False,)
    return (True, False, True)


LOWERINGS = {"mo.lstm": _lowering(lstm, 2), "mo.gru": _lowering(gru, 4), "mo.rnn": _lowering(rnn, 2)}  # fmt: skip
