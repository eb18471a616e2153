"""Errors of ops for drawn arguments are TypeErrors or ValueErrors that name the op, never internal errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

DEVICE = DeviceRef.CPU()
NAMES = [n for n in ops.__all__ if isinstance(inspect.unwrap(getattr(ops, n)), FunctionType)]
BAD: dict[str, Any] = {
    "None": None, "text": "x", "object": object(), "fraction": 3.5, "negative": -7, "empty list": [], "dictionary": {},
    "complex": np.zeros((2, 2, 2, 2, 2), np.complex64), "dtype": DType.int8, "bytes": b"q", "nan": float("nan"),
    "slice": slice(0, 1), "dots": ..., "rank 4": "rank 4", "buffer": "buffer", "integers": "integers",
}  # fmt: skip
# an inner op that the error may name instead
PARTS = {"slice_tensor": "slice", "outer": "reshape", "floor_div": "div", "silu": "sigmoid"}


def arguments(
    function: Callable[..., Any], count: int, at: int, bad: Any, inputs: Any
) -> list[Any]:
    """Draws arguments of plausible types, one of which is invalid."""
    x, integers, mask, buffer, wide = inputs
    special = {"rank 4": wide.tensor, "buffer": buffer.buffer, "integers": integers.tensor}
    made: list[Any] = []
    for position, parameter in enumerate(
        list(inspect.signature(function).parameters.values())[:count]
    ):
        kind = str(parameter.annotation)
        if position == at:
            made.append(special.get(bad, bad) if isinstance(bad, str) else bad)
        elif parameter.default is not parameter.empty:
            made.append(parameter.default)
        elif "Iterable" in kind or "Sequence" in kind:
            made.append([x.tensor])
        elif "BufferValue" in kind:
            made.append(buffer.buffer)
        elif parameter.name in ("mask", "condition", "pred"):
            made.append(mask.tensor)
        elif "ind" in parameter.name:
            made.append(integers.tensor)
        else:
            made.append(1 if kind.startswith("int") else x.tensor)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments(name: str) -> None:
    function = getattr(ops, name)
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    needed = len([p for p in parameters if p.default is p.empty])
    types = [
        TensorType(DType.float32, ["n", 4], DEVICE), TensorType(DType.int64, [3], DEVICE),
        TensorType(DType.bool, ["n", 4], DEVICE), BufferType(DType.float32, [4], DEVICE),
        TensorType(DType.float32, ["a", "b", "c", "d"], DEVICE),
    ]  # fmt: skip
    for count in range(needed, len(parameters) + 1):
        for at in range(count):
            for bad in BAD.values():
                with Graph("bad", input_types=types) as graph:
                    given = arguments(function, count, at, bad, graph.inputs)
                    try:
                        function(*given)
                    except (TypeError, ValueError, NotImplementedError, IndexError) as error:
                        assert str(error), given
                        python = type(error) in (TypeError, AttributeError)
                        if python and ("NoneType" in str(error) or "object" in str(error)):
                            # Python's own message is prefixed with the op's name
                            assert name in str(error) or PARTS.get(name, name) in str(error), error


def test_the_users_own_errors_stay() -> None:
    with Graph("own", input_types=[TensorType(DType.bool, [], DEVICE)]) as graph:
        with pytest.raises(AttributeError, match=r"^'NoneType' object has no attribute 'mine'$"):
            ops.cond(graph.inputs[0].tensor, None, lambda: None.mine, lambda: None)  # type: ignore


def test_the_message_says_what_was_given() -> None:
    with Graph("told", input_types=[TensorType(DType.float32, [4], DEVICE)]) as graph:
        with pytest.raises(TypeError, match=r"^split: .*called with \(TensorValue.*, None\)$"):
            ops.split(graph.inputs[0].tensor, None)  # type: ignore[arg-type]


def test_devices_are_no_texts() -> None:
    for make in (lambda: TensorType(DType.float32, (4,), "cpu"), lambda: DeviceRef.from_device(3)):
        with pytest.raises(TypeError, match=r"the device is .*expected a DeviceRef"):
            make()
