"""Recurrent layers over whole sequences, in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from max._interpreter.core import Array, register


def _sigmoid(x: Array) -> Array:
    # no overflow for large magnitudes
    return 0.5 * (1 + np.tanh(0.5 * x))


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def _activation(name: str, clip: float) -> Callable[[Array], Array]:
    function = _FUNCTIONS[name]
    return (lambda x: function(np.clip(x, -clip, clip))) if clip else function


Step = Callable[[int, Array, list[Array], Array], list[Array]]
"""``(direction, gates [batch, gates, hidden], states, weight [hidden, gates, hidden]) -> states``"""


def _run(
    gates: Array, weight: Array, states: list[Array], lengths: Array, direction: str, step: Step
) -> tuple[Array, ...]:
    """Applies a step to all sequences, in each direction; the outputs and the last states."""
    length, batch, directions, _, hidden = gates.shape
    ends = np.clip(lengths, 0, length)
    outputs = np.zeros((length, directions, batch, hidden))
    rows = np.arange(batch, dtype=np.int64)
    finals: list[Array] = [state.astype(np.float64) for state in states]
    for d in range(directions):
        # [blocks, elements, gates, 16] to [elements, gates, units]
        packed = weight[d].astype(np.float64).transpose(1, 2, 0, 3)
        matrix = packed.reshape(*packed.shape[:2], -1)[:hidden, :, :hidden]
        backward = direction == "reverse" or d == 1
        for number in range(length):
            active = number < ends
            # rows that have ended read any position: their results are dropped
            at = np.where(active & backward, ends - 1 - number, number)
            before = [final[d] for final in finals]
            after = step(d, gates[at, rows, d].astype(np.float64), before, matrix)
            for final, new, old in zip(finals, after, before, strict=True):
                final[d] = np.where(active[:, None], new, old)
            outputs[at, d, rows] = np.where(active[:, None], after[0], 0)
    return (outputs, *finals)


@register("mo.lstm")
def _lstm(
    gates: Array,
    weight: Array,
    state: Array,
    memory: Array,
    peepholes: Array,
    lengths: Array,
    direction: str,
    clip: float,
    gate: str,
    candidate: str,
    output: str,
    coupled: bool,
    looks: bool,
) -> tuple[Array, ...]:
    opens, proposes = _activation(gate, clip), _activation(candidate, clip)

    def step(d: int, row: Array, states: list[Array], matrix: Array) -> list[Array]:
        hidden, cell = states
        sums = row + np.einsum("bi,igj->bgj", hidden, matrix)
        # the order of ONNX: input, output, forget, cell
        enter, leave, forget, new = (sums[:, i] for i in range(4))
        views = peepholes[d].astype(np.float64) if looks else np.zeros((3, 1))
        entered = opens(enter + views[0] * cell)
        kept = 1 - entered if coupled else opens(forget + views[2] * cell)
        after = kept * cell + entered * proposes(new)
        return [opens(leave + views[1] * after) * _FUNCTIONS[output](after), after]

    return _run(gates, weight, [state, memory], lengths, direction, step)


@register("mo.gru")
def _gru(
    gates: Array,
    weight: Array,
    state: Array,
    bias: Array,
    lengths: Array,
    direction: str,
    clip: float,
    gate: str,
    candidate: str,
    reset_after: bool,
) -> tuple[Array, ...]:
    opens, proposes = _activation(gate, clip), _activation(candidate, clip)

    def step(d: int, row: Array, states: list[Array], matrix: Array) -> list[Array]:
        (before,) = states
        sums = np.einsum("bi,igj->bgj", before, matrix[:, :2])
        update, reset = opens(row[:, 0] + sums[:, 0]), opens(row[:, 1] + sums[:, 1])
        if reset_after:
            inner = reset * (before @ matrix[:, 2] + bias[d])
        else:
            inner = (reset * before) @ matrix[:, 2] + bias[d]
        new = proposes(row[:, 2] + inner)
        return [(1 - update) * new + update * before]

    return _run(gates, weight, [state], lengths, direction, step)


@register("mo.rnn")
def _rnn(
    gates: Array,
    weight: Array,
    state: Array,
    lengths: Array,
    direction: str,
    clip: float,
    candidate: str,
) -> tuple[Array, ...]:
    proposes = _activation(candidate, clip)

    def step(d: int, row: Array, states: list[Array], matrix: Array) -> list[Array]:
        return [proposes(row[:, 0] + states[0] @ matrix[:, 0])]

    return _run(gates, weight, [state], lengths, direction, step)
