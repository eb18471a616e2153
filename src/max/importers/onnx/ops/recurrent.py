"""Recurrent layers: LSTM, GRU and RNN, by kernels for whole sequences; steps in a graph for what those do not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.importers.control import bounded_loop
from max.importers.errors import Unsupported
from max.importers.functions import mathematics
from max.importers.functions.indexing import pad_axes, reverse_by_length
from max.importers.functions.reductions import reversed_along
from max.importers.node import Node
from max.importers.onnx.table import op

Activation = Callable[[TensorValue], TensorValue]
_KNOWN = ("sigmoid", "tanh", "relu")
"""The activations of the kernels."""
_UNITS = 16
"""The units of a block of packed weights."""
_UNROLLED = 8
"""Sequences of up to this length are staged step by step, longer ones as a loop."""


def _activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    """An activation by its name, in any case."""
    defaults: dict[str, tuple[float, float]] = {
        "affine": (1.0, 0.0), "leakyrelu": (0.01, 0.0), "thresholdedrelu": (1.0, 0.0), "scaledtanh": (1.0, 1.0),
        "hardsigmoid": (0.2, 0.5), "elu": (1.0, 0.0),
    }  # fmt: skip
    low = name.lower()
    a, b = defaults.get(low, (0.0, 0.0))
    a, b = (a if alpha is None else alpha), (b if beta is None else beta)
    table: dict[str, Activation] = {
        "sigmoid": ops.sigmoid,
        "tanh": ops.tanh,
        "relu": ops.relu,
        "affine": lambda x: x * a + b,
        "leakyrelu": lambda x: ops.where(x < 0, x * a, x),
        "thresholdedrelu": lambda x: ops.where(x > a, x, 0.0),
        "scaledtanh": lambda x: ops.tanh(x * b) * a,
        "hardsigmoid": lambda x: mathematics.clamp(x * a + b, 0.0, 1.0),
        "elu": lambda x: ops.where(x < 0, mathematics.expm1(x) * a, x),
        "softsign": lambda x: x / (ops.abs(x) + 1.0),
        "softplus": mathematics.softplus,
    }
    if low not in table:
        raise Unsupported(f"the activation is {name!r}")
    return table[low]


class _Layer:
    """What the layers have in common.

    Args:
        node: The layer.
        gates: The number of gates.
        names: The default activations of one direction.
    """

    def __init__(self, node: Node, gates: int, names: Sequence[str]) -> None:
        self.node = node
        direction = node.attr("direction", "forward")
        if direction not in ("forward", "reverse", "bidirectional"):
            raise Unsupported(f"the direction is {direction!r}")
        self.directions = 2 if direction == "bidirectional" else 1
        self.backwards = [direction == "reverse"] if self.directions == 1 else [False, True]
        self.batch_first = bool(node.attr("layout", 0))
        x = node.tensor(0)
        self.x = ops.permute(x, [1, 0, 2]) if self.batch_first else x  # [length, batch, input]
        self.length, self.batch = self.x.shape[0], self.x.shape[1]
        self.hidden = node.attr("hidden_size") or node.static(node.tensor(2).shape[-1], 2)
        self.gates = gates
        self.clip = node.attr("clip", 0.0)
        self.activations = self._activations(names)
        self.names = [
            str(n).lower() for n in node.attr("activations") or list(names) * self.directions
        ]
        lengths = node.tensor(4) if node.has(4) else None
        self.lengths = None if lengths is None else ops.cast(lengths, DType.int64)

    def _activations(self, names: Sequence[str]) -> list[list[Activation]]:
        node = self.node
        # alphas and betas stand in two lists, for those activations that take one
        given = node.attr("activations") or list(names) * self.directions
        alphas = list(node.attr("activation_alpha") or [])
        betas = list(node.attr("activation_beta") or [])
        takes_alpha = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
        takes_beta = {"affine", "scaledtanh", "hardsigmoid"}
        found: list[Activation] = []
        for name in given:
            alpha = alphas.pop(0) if alphas and name.lower() in takes_alpha else None
            beta = betas.pop(0) if betas and name.lower() in takes_beta else None
            found.append(_activation(name, alpha, beta))
        each = len(names)
        return [found[i * each : (i + 1) * each] for i in range(self.directions)]

    def known_activations(self) -> list[str] | None:
        """The names of the activations, if a kernel knows them and both directions have the same."""
        each = len(self.names) // self.directions
        first = self.names[:each]
        fits = self.x.dtype is DType.float32 and self.hidden > 0 and self.clip >= 0
        # kernels have one set of activations for both directions
        alike = self.names == first * self.directions and len(first) == len(self.activations[0])
        return first if fits and alike and all(name in _KNOWN for name in first) else None

    def packed_weights(self) -> TensorValue:
        """The weights of the states ``[directions, blocks, elements, gates, 16]``, with zeros behind the last ones."""
        hidden, blocks = self.hidden, -(-self.hidden // _UNITS)
        weight = ops.reshape(self.node.tensor(2), [self.directions, self.gates, hidden, hidden])
        # whole blocks: the weights behind the last unit are 0, so that no state depends on it
        more = blocks * _UNITS - hidden
        if more:
            weight = pad_axes(weight, [(0, 0), (0, 0), (0, more), (0, more)], "constant", 0)
        weight = ops.reshape(weight, [self.directions, self.gates, blocks, _UNITS, blocks * _UNITS])
        # [directions, gates, blocks, units, elements]: a block's gates side by side for each element of the state
        return ops.permute(weight, [0, 2, 4, 1, 3])

    def products(self, bias: TensorValue | None) -> TensorValue:
        """The products of the inputs with their weights: ``[length, batch, directions, gates, hidden]``.

        Args:
            bias: ``[directions * gates * hidden]``, or none.
        """
        weight = self.node.tensor(1)
        size = weight.shape[2]
        # one product for all steps and directions: it does not depend on states
        flat = ops.reshape(weight, [self.directions * self.gates * self.hidden, size])
        y = ops.matmul(self.x, ops.transpose(flat, 0, 1))
        y = y if bias is None else y + bias
        return ops.reshape(y, [self.length, self.batch, self.directions, self.gates, self.hidden])

    def biases(self) -> tuple[TensorValue, TensorValue] | None:
        """The biases of the inputs and of the recurrence, ``[directions, gates, hidden]``."""
        if not self.node.has(3):
            return None
        # ONNX stores the biases of the inputs before those of the recurrence
        both = ops.reshape(self.node.tensor(3), [self.directions, 2, self.gates, self.hidden])
        return both[:, 0], both[:, 1]

    def first(self, index: int) -> TensorValue:
        """The initial states ``[directions, batch, hidden]``."""
        shape = [self.directions, self.batch, self.hidden]
        if not self.node.has(index):
            return ops.broadcast_to(ops.constant(np.zeros((), np.float32)), shape)
        tensor = self.node.tensor(index)
        return ops.rebind(ops.permute(tensor, [1, 0, 2]) if self.batch_first else tensor, shape)

    def ends(self) -> TensorValue:
        """The length of each sequence."""
        if self.lengths is not None:
            return ops.rebind(self.lengths, [self.batch])
        return ops.broadcast_to(ops.cast(TensorValue(self.length), DType.int64), [self.batch])

    def form(self, **more: Any) -> dict[str, Any]:
        """The attributes of the kernels."""
        direction = self.node.attr("direction", "forward")
        return {"direction": direction, "clip": float(self.clip), **more}

    def outputs(self, results: list[TensorValue]) -> tuple[Any, ...]:
        """The results of the op, of those of a kernel."""
        y, *states = results
        if self.batch_first:
            y = ops.permute(y, [2, 0, 1, 3])
            states = [ops.permute(state, [1, 0, 2]) for state in states]
        return y, *states

    def flat(self, bias: TensorValue) -> TensorValue:
        """A bias ``[directions, gates, hidden]`` as a row."""
        return ops.reshape(bias, [self.directions * self.gates * self.hidden])

    def clip_gate(self, x: TensorValue) -> TensorValue:
        """A gate before its activation."""
        return mathematics.clamp(x, -self.clip, self.clip) if self.clip else x

    def part(self, index: int, direction: int) -> TensorValue:
        """One direction of an operand."""
        tensor = self.node.tensor(index)
        return ops.reshape(tensor[direction], tensor.shape[1:])

    def start(self, index: int, direction: int) -> TensorValue:
        """The initial state of a direction; zeros where the model gives none."""
        if not self.node.has(index):
            zero = ops.constant(np.zeros((), self.x.dtype.to_numpy()))
            return ops.broadcast_to(zero, [self.batch, self.hidden])
        tensor = self.node.tensor(index)
        if self.batch_first:
            tensor = ops.permute(tensor, [1, 0, 2])
        return ops.reshape(tensor[direction], [self.batch, self.hidden])

    def inputs(self, direction: int) -> TensorValue:
        """What the gates get of the whole sequence, ``[length, batch, gates * hidden]``, in the direction's order."""
        x = self.x
        if self.backwards[direction]:
            x = (
                reversed_along(x, 0)
                if self.lengths is None
                else reverse_by_length(x, self.lengths, 0, 1)
            )
        weight = self.part(1, direction)
        return ops.matmul(x, ops.transpose(weight, 0, 1))

    def bias(self, direction: int) -> tuple[TensorValue, TensorValue] | None:
        """The biases of the inputs and of the recurrence."""
        if not self.node.has(3):
            return None
        both = self.part(3, direction)
        count = self.gates * self.hidden
        return both[:count], both[count : 2 * count]

    def recurrence(
        self,
        direction: int,
        inputs: TensorValue,
        state: list[TensorValue],
        cell: Callable[..., list[TensorValue]],
    ) -> tuple[TensorValue, list[TensorValue]]:
        """Applies a cell to all steps; the outputs in the order of time, and the last state."""

        def step(position: TensorValue, current: list[TensorValue]) -> Any:
            row = ops.gather(inputs, position, 0)
            following = cell(row, current)
            output = following[0]
            if self.lengths is not None:
                # behind the end of a sequence its state stays, and its output is 0
                active = ops.reshape(position < self.lengths, [self.batch, 1])
                following = [
                    ops.where(active, new, old) for new, old in zip(following, current, strict=True)
                ]
                output = ops.where(active, output, 0.0)
            return None, following, [output]

        try:
            length = int(self.length)
        except TypeError:
            length = _UNROLLED + 1
        if length <= _UNROLLED:
            # a short sequence is staged step by step: a loop's overhead would exceed its products
            outputs: list[TensorValue] = []
            for number in range(length):
                _, state, (output,) = step(ops.constant(number, DType.int64), state)
                outputs.append(output)
            if outputs:
                stacked = ops.stack(outputs, 0)
            else:
                stacked = ops.broadcast_to(
                    ops.constant(np.zeros((), self.x.dtype.to_numpy())), [0, *state[0].shape]
                )
        else:
            state, (stacked,) = bounded_loop(TensorValue(self.length), state, step, self.length)
        if self.backwards[direction]:
            lengths = self.lengths
            stacked = (
                reversed_along(stacked, 0)
                if lengths is None
                else reverse_by_length(stacked, lengths, 0, 1)
            )
        return stacked, state

    def results(
        self, outputs: list[TensorValue], states: list[list[TensorValue]]
    ) -> tuple[Any, ...]:
        """The results of the op: the outputs of all steps, and the last states."""
        y = ops.stack(outputs, 1)
        finals = [ops.stack([state[i] for state in states], 0) for i in range(len(states[0]))]
        if self.batch_first:
            y = ops.permute(y, [2, 0, 1, 3])
            finals = [ops.permute(final, [1, 0, 2]) for final in finals]
        return y, *finals


@op("RNN")
def rnn(node: Node) -> Any:
    layer = _Layer(node, 1, ("Tanh",))
    names = layer.known_activations()
    if names is not None:
        both = layer.biases()
        bias = None if both is None else layer.flat(both[0] + both[1])
        operands = [layer.products(bias), layer.packed_weights(), layer.first(5), layer.ends()]
        return layer.outputs(stage_declared("rnn", operands, layer.form(candidate=names[0])))
    outputs, states = [], []
    for d in range(layer.directions):
        inputs, bias = layer.inputs(d), layer.bias(d)
        if bias is not None:
            inputs = inputs + (bias[0] + bias[1])
        weight = ops.transpose(layer.part(2, d), 0, 1)

        def cell(
            row: TensorValue, state: list[TensorValue], d: int = d, weight: TensorValue = weight
        ) -> Any:
            return [layer.activations[d][0](layer.clip_gate(row + ops.matmul(state[0], weight)))]

        stacked, last = layer.recurrence(d, inputs, [layer.start(5, d)], cell)
        outputs.append(stacked)
        states.append(last)
    return layer.results(outputs, states)


@op("GRU")
def gru(node: Node) -> Any:
    layer = _Layer(node, 3, ("Sigmoid", "Tanh"))
    h = layer.hidden
    linear = bool(node.attr("linear_before_reset", 0))
    names = layer.known_activations()
    if names is not None:
        both, own = layer.biases(), [layer.directions, h]
        if both is None:
            outer, inner = None, ops.constant(np.zeros(own, np.float32))
        else:
            # the bias of the state's product for the candidate stays inside of the reset gate
            gates = both[0][:, :2] + both[1][:, :2]
            outer = layer.flat(ops.concat([gates, both[0][:, 2:]], 1))
            inner = ops.reshape(both[1][:, 2:], own)
        operands = [
            layer.products(outer),
            layer.packed_weights(),
            layer.first(5),
            inner,
            layer.ends(),
        ]
        form = layer.form(gate=names[0], candidate=names[1], reset_after=linear)
        return layer.outputs(stage_declared("gru", operands, form))
    outputs, states = [], []
    for d in range(layer.directions):
        inputs, bias = layer.inputs(d), layer.bias(d)
        inner_bias: TensorValue | None = None
        if bias is not None:
            # the candidate's own bias is added at its product, inside of the reset gate
            outer = bias[0] + ops.concat([bias[1][: 2 * h], bias[1][2 * h :] * 0.0], 0)
            inner_bias = bias[1][2 * h :]
            inputs = inputs + outer
        weight = ops.transpose(layer.part(2, d), 0, 1)
        gate, candidate = layer.activations[d]

        def cell(
            row: TensorValue,
            state: list[TensorValue],
            weight: TensorValue = weight,
            inner_bias: TensorValue | None = inner_bias,
            gate: Activation = gate,
            candidate: Activation = candidate,
        ) -> Any:
            (before,) = state
            rest = ops.matmul(before, weight[:, : 2 * h])  # [batch, 2 * hidden]: update and reset
            update = gate(layer.clip_gate(row[:, :h] + rest[:, :h]))
            reset = gate(layer.clip_gate(row[:, h : 2 * h] + rest[:, h:]))
            own = weight[:, 2 * h :]
            if linear:
                inner = ops.matmul(before, own)
                inner = reset * (inner if inner_bias is None else inner + inner_bias)
            else:
                inner = ops.matmul(reset * before, own)
                inner = inner if inner_bias is None else inner + inner_bias
            new = candidate(layer.clip_gate(row[:, 2 * h :] + inner))
            return [(1.0 - update) * new + update * before]

        stacked, last = layer.recurrence(d, inputs, [layer.start(5, d)], cell)
        outputs.append(stacked)
        states.append(last)
    return layer.results(outputs, states)


@op("LSTM")
def lstm(node: Node) -> Any:
    layer = _Layer(node, 4, ("Sigmoid", "Tanh", "Tanh"))
    h = layer.hidden
    coupled = bool(node.attr("input_forget", 0))
    names = layer.known_activations()
    if names is not None:
        both = layer.biases()
        bias = None if both is None else layer.flat(both[0] + both[1])
        shape = [layer.directions, 3, h]
        looks = node.has(7)
        none = ops.constant(np.zeros(shape, np.float32))
        views = ops.reshape(node.tensor(7), shape) if looks else none
        starts = [layer.first(5), layer.first(6)]
        operands = [layer.products(bias), layer.packed_weights(), *starts, views, layer.ends()]
        form = layer.form(
            gate=names[0], candidate=names[1], output=names[2], coupled=coupled, looks=looks
        )
        return layer.outputs(stage_declared("lstm", operands, form))
    outputs, states = [], []
    for d in range(layer.directions):
        inputs, bias = layer.inputs(d), layer.bias(d)
        if bias is not None:
            inputs = inputs + (bias[0] + bias[1])
        weight = ops.transpose(layer.part(2, d), 0, 1)
        peepholes = layer.part(7, d) if node.has(7) else None
        gate, candidate, output = layer.activations[d]

        def cell(
            row: TensorValue,
            state: list[TensorValue],
            weight: TensorValue = weight,
            peepholes: TensorValue | None = peepholes,
            gate: Activation = gate,
            candidate: Activation = candidate,
            output: Activation = output,
        ) -> Any:
            hidden, memory = state
            gates = row + ops.matmul(hidden, weight)
            # ONNX's order: input, output, forget, cell
            enter, leave, forget, new = (gates[:, i * h : (i + 1) * h] for i in range(4))
            if peepholes is not None:
                enter = enter + peepholes[:h] * memory
                forget = forget + peepholes[2 * h :] * memory
            enter = gate(layer.clip_gate(enter))
            kept = 1.0 - enter if coupled else gate(layer.clip_gate(forget))
            following = kept * memory + enter * candidate(layer.clip_gate(new))
            if peepholes is not None:
                # the output gate sees the new memory, the others the one before
                leave = leave + peepholes[h : 2 * h] * following
            return [gate(layer.clip_gate(leave)) * output(following), following]

        stacked, last = layer.recurrence(d, inputs, [layer.start(5, d), layer.start(6, d)], cell)
        outputs.append(stacked)
        states.append(last)
    return layer.results(outputs, states)
