"""Recurrent layers over whole sequences: LSTM, GRU and the plain layer, in one or both directions.

`gates` has the products of the inputs with their biases, ``[length, batch, directions, gates, hidden]``. The weights of
the states are packed in blocks of 16 units: ``weight[d, u, i, g, j]`` is what element ``i`` of a state adds to gate
``g`` of unit ``16 u + j``; elements and units beyond `hidden` have zeros. A sequence ends at its length: outputs behind
it are zeros, and it starts there in reverse.
"""

from __future__ import annotations

from max.dtype import DType
from max.mlir.declare import NamedTypes, declare, static_dims
from max.mlir.operand import Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.types import TensorType

UNITS = 16
"""The units of a block."""

_F32 = (DType.float32,)
_LENGTHS = Operand("lengths", (DType.int64,), 1)
_ATTRIBUTES = {"direction": str, "clip": float}
_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
_FUNCTIONS = ("sigmoid", "tanh", "relu")


def _layer_types(op: str, gates: int, types: NamedTypes, attrs: Attrs) -> Types:
    """Checks what layers have in common; the types of outputs and of the last state."""
    x, weight, state = types["gates"], types["weight"], types["state"]
    directions, count, hidden = static_dims(op, "gates", x, 2, 3, 4)
    if attrs["direction"] not in _DIRECTIONS:
        raise ValueError(f"{op}: direction is {attrs['direction']!r}, expected {', '.join(_DIRECTIONS)}")  # fmt: skip
    if count != gates or directions != _DIRECTIONS[attrs["direction"]] or hidden < 1:
        raise ValueError(
            f"{op}: gates is {x.short}, expected [length, batch, "
            f"{_DIRECTIONS[attrs['direction']]}, {gates}, hidden]"
        )
    blocks = -(-hidden // UNITS)
    expected = (directions, blocks, blocks * UNITS, gates, UNITS)
    if weight.shape != weight.with_shape(expected).shape:
        raise ValueError(f"{op}: weight is {weight.short}, expected {list(expected)}")
    for name in ("state", "memory"):
        if name in types and types[name].shape != (x.shape[2], x.shape[1], x.shape[4]):
            raise ValueError(
                f"{op}: {name} is {types[name].short}, gates {x.short}; expected [directions, batch, hidden]"
            )
    if types["lengths"].shape != (x.shape[1],):
        raise ValueError(f"{op}: lengths is {types['lengths'].short}, gates {x.short}")
    for name in ("gate", "candidate", "output"):
        if name in attrs and attrs[name] not in _FUNCTIONS:
            raise ValueError(
                f"{op}: {name} is {attrs[name]!r}, expected one of {', '.join(_FUNCTIONS)}"
            )
    assert isinstance(state, TensorType)
    outputs = x.with_shape((x.shape[0], x.shape[2], x.shape[1], x.shape[4])).shape
    return (TensorType.get(DType.float32, outputs, x.device), state)


def _check_units(op: str, types: NamedTypes, name: str, *first: int) -> None:
    """Checks an operand ``[directions, …, hidden]``."""
    x = types["gates"]
    if types[name].shape != types[name].with_shape((x.shape[2], *first, x.shape[4])).shape:
        raise ValueError(f"{op}: {name} is {types[name].short}, gates {x.short}")


def _lstm_types(types: NamedTypes, attrs: Attrs) -> Types:
    outputs, state = _layer_types("lstm", 4, types, attrs)
    _check_units("lstm", types, "peepholes", 3)
    return (outputs, state, state)


define(
    declare(
        "mo.lstm",
        (
            # the gates: input, output, forget, candidate; peepholes: input, output, forget
            Operand("gates", _F32, 5),
            Operand("weight", _F32, 5),
            Operand("state", _F32, 3),
            Operand("memory", _F32, 3),
            Operand("peepholes", _F32, 3),
            _LENGTHS,
        ),
        3,
        _lstm_types,
        attributes={
            **_ATTRIBUTES,
            "gate": str,
            "candidate": str,
            "output": str,
            # whether the forget gate is one less the input gate; whether the peepholes are used
            "coupled": bool,
            "looks": bool,
        },
        takes=(
            "gates f32 `[length, batch, directions, 4, hidden]`, weight f32 `[directions, blocks, "
            "16 * blocks, 4, 16]`, state and memory f32 `[directions, batch, hidden]`, peepholes "
            "f32 `[directions, 3, hidden]`, lengths i64 `[batch]`"
        ),
        gives="outputs `[length, directions, batch, hidden]`, last state, last memory",
        doc="a layer of long short-term memory over whole sequences",
    )
)


def _gru_types(types: NamedTypes, attrs: Attrs) -> Types:
    found = _layer_types("gru", 3, types, attrs)
    _check_units("gru", types, "bias")
    return found


define(
    declare(
        "mo.gru",
        (
            # the gates: update, reset, candidate; bias: of the state's product for the candidate
            Operand("gates", _F32, 5),
            Operand("weight", _F32, 5),
            Operand("state", _F32, 3),
            Operand("bias", _F32, 2),
            _LENGTHS,
        ),
        2,
        _gru_types,
        # reset_after: whether the reset gate scales the state's product, not the state
        attributes={**_ATTRIBUTES, "gate": str, "candidate": str, "reset_after": bool},
        takes="as `mo.lstm` with 3 gates; bias f32 `[directions, hidden]` for memory and peepholes",
        gives="outputs, last state",
        doc="a layer of gated recurrent units over whole sequences",
    )
)


def _rnn_types(types: NamedTypes, attrs: Attrs) -> Types:
    return _layer_types("rnn", 1, types, attrs)


define(
    declare(
        "mo.rnn",
        (
            Operand("gates", _F32, 5),
            Operand("weight", _F32, 5),
            Operand("state", _F32, 3),
            _LENGTHS,
        ),
        2,
        _rnn_types,
        attributes={**_ATTRIBUTES, "candidate": str},
        takes="as `mo.lstm` with 1 gate, without memory and peepholes",
        gives="outputs, last state",
        doc="a plain recurrent layer over whole sequences",
    )
)
