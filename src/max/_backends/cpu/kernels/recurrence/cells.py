"""The formulas of LSTM, GRU and plain recurrent layers: the state of a row's units, from their sums and inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k


class Lstm(NamedTuple):
    """The operands of `mo.lstm`."""

    gates: k.Input
    weight: k.Input
    state: k.Input
    memory: k.Input
    peepholes: k.Input
    lengths: k.Input


class Gru(NamedTuple):
    """The operands of `mo.gru`."""

    gates: k.Input
    weight: k.Input
    state: k.Input
    bias: k.Input
    lengths: k.Input


class Plain(NamedTuple):
    """The operands of `mo.rnn`."""

    gates: k.Input
    weight: k.Input
    state: k.Input
    lengths: k.Input


class Form(NamedTuple):
    """What is known at compile time.

    Args:
        direction: `forward`, `reverse` or `bidirectional`.
        clip: The bound of gates before their activations; 0: none.
        gate: The activation of gates.
        candidate: The activation of what is proposed.
        output: The activation of an LSTM's memory.
        coupled: Whether an LSTM's forget gate is one less its input gate.
        looks: Whether the peepholes are used.
        reset_after: Whether a GRU's reset gate scales the product.
    """

    direction: str
    clip: float
    gate: str
    candidate: str
    output: str
    coupled: bool
    looks: bool
    reset_after: bool


@k.inline
def activate_gate(x: k.Value, name: str, clip: float) -> Any:
    """An activation by its name, of a gate that is clipped if `clip` is not 0."""
    bounded = k.max(k.min(x, k.f32(clip)), k.f32(-clip)) if clip else x
    if name == "sigmoid":
        return k.sigmoid(bounded)
    if name == "tanh":
        return k.tanh(bounded)
    return k.max(bounded, k.f32(0))


class Units(NamedTuple):
    """The units of a row that a cell computes.

    Args:
        d: The direction.
        row: The sequence.
        at: The first unit.
        width: Lanes.
        mask: The units that exist; None: all.
    """

    d: Any
    row: Any
    at: Any
    width: int
    mask: Any


@k.inline
def lstm_cell(
    outs: tuple[Any, ...], sums: Any, inputs: Any, source: Any, x: Lstm, form: Form, units: Units
) -> Any:
    """The state of an LSTM; `outs` are the outputs, and the memory, which is updated in place."""
    memory, (d, row, at, width, mask) = outs[1], units
    # the order of ONNX: input, output, forget, cell
    enter, leave, forget, new = [sums[g] + inputs[g] for g in k.static_range(4)]
    cell = memory.load(d, row, at, width=width, mask=mask)
    # peepholes have the order of ONNX too: input, output, forget
    if form.looks:
        enter = enter + cell * x.peepholes.load(d, 0, at, width=width, mask=mask)
        forget = forget + cell * x.peepholes.load(d, 2, at, width=width, mask=mask)
    entered = activate_gate(enter, form.gate, form.clip)
    kept = 1.0 - entered if form.coupled else activate_gate(forget, form.gate, form.clip)
    after = kept * cell + entered * activate_gate(new, form.candidate, form.clip)
    # the output gate sees the new memory, the others the old one
    if form.looks:
        leave = leave + after * x.peepholes.load(d, 1, at, width=width, mask=mask)
    memory.store(d, row, at, value=after, mask=mask)
    return activate_gate(leave, form.gate, form.clip) * activate_gate(after, form.output, 0.0)


@k.inline
def rnn_cell(
    outs: tuple[Any, ...], sums: Any, inputs: Any, source: Any, x: Plain, form: Form, units: Units
) -> Any:
    """The state of a plain layer."""
    return activate_gate(sums[0] + inputs[0], form.candidate, form.clip)


@k.inline
def gru_cell(
    outs: tuple[Any, ...], sums: Any, inputs: Any, source: k.View, x: Gru, form: Form, units: Units
) -> Any:
    """The state of a GRU whose reset gate scales the product."""
    # the order of ONNX: update, reset, hidden
    update = activate_gate(inputs[0] + sums[0], form.gate, form.clip)
    reset = activate_gate(inputs[1] + sums[1], form.gate, form.clip)
    # the reset gate scales the bias of the product too
    inner = sums[2] + x.bias.load(units.d, units.at, width=units.width, mask=units.mask)
    new = activate_gate(inputs[2] + reset * inner, form.candidate, form.clip)
    old = source.load(units.d, units.row, units.at, width=units.width, mask=units.mask)
    return (1.0 - update) * new + update * old


@k.inline
def gru_candidate_cell(
    outs: tuple[Any, ...], sums: Any, inputs: Any, source: k.View, x: Gru, form: Form, units: Units
) -> Any:
    """The state of a GRU after `gru_gates`; `outs` are the outputs, and the update gates."""
    updates, (d, row, at, width, mask) = outs[1], units
    inner = sums[0] + x.bias.load(d, at, width=width, mask=mask)
    new = activate_gate(inputs[0] + inner, form.candidate, form.clip)
    update = updates.load(d, row, at, width=width, mask=mask)
    old = source.load(d, row, at, width=width, mask=mask)
    return (1.0 - update) * new + update * old
