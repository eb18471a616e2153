"""`F.functional` of functions of the user: what they get, when they run, and what they return."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor
from max.experimental import functional as F
from max.experimental.programs.programs import compiled_programs
from max.graph import BufferType, DeviceRef, Dim, DimLike, Graph, TensorType, TensorValue, ops

_CPU = DeviceRef.CPU()


@F.functional
def causal_mask(
    sequence_length: DimLike, num_tokens: DimLike, *, dtype: DType, device: Any
) -> Tensor:
    """The mask of the book "LLM from scratch": no argument is a tensor."""
    total = Dim(sequence_length) + num_tokens
    mask = Tensor.constant(float("-inf"), dtype=dtype, device=device)
    mask = F.broadcast_to(mask, shape=(sequence_length, total))
    return F.band_part(mask, num_lower=None, num_upper=0, exclude=True)


def _mask(rows: int, columns: int) -> np.ndarray[Any, Any]:
    kept = np.triu(np.ones((rows, columns), bool), 1)
    return np.where(kept, np.float32(-np.inf), np.float32(0))


def test_no_argument_is_a_tensor() -> None:
    before = compiled_programs()
    for length in range(2, 12):
        found = causal_mask(length, length % 3, dtype=DType.float32, device=CPU())
        assert isinstance(found, Tensor)
        np.testing.assert_array_equal(found.to_numpy(), _mask(length, length + length % 3))
    # sizes become symbols
    assert compiled_programs() - before <= 4


def test_no_argument_is_a_tensor_in_a_graph() -> None:
    types = [TensorType(DType.float32, ("n", 3), _CPU)]
    with Graph("masked", input_types=types) as graph:
        x = graph.inputs[0].tensor
        mask = causal_mask(x.shape[0], 1, dtype=DType.float32, device=CPU())
        assert isinstance(mask, Tensor) and list(mask.shape) == ["n", Dim("n") + 1]
        graph.output(TensorValue(mask))
    from max.engine import InferenceSession

    model = InferenceSession().load(graph)
    for rows in (1, 4):
        (found,) = model.execute(np.zeros((rows, 3), np.float32))
        np.testing.assert_array_equal(found.to_numpy(), _mask(rows, rows + 1))


def test_it_runs_at_each_call() -> None:
    """What the function reads besides its arguments may change."""
    scale, weights, seen = [2.0], [Tensor([1.0, 2.0])], []

    @F.functional
    def scaled(x: Tensor) -> Tensor:
        seen.append(type(x))
        return x * scale[0] + weights[0]

    @F.functional
    def scaled_values(x: Tensor) -> TensorValue:
        seen.append(Graph.current.name)
        return TensorValue(x) * scale[0] + weights[0]

    @F.functional
    def annotated(x: TensorValue) -> TensorValue:
        seen.append(type(x))
        return x * scale[0] + weights[0]

    class Layer:
        factor = 1

        @F.functional
        def forward(self, x: Tensor) -> Tensor:
            seen.append(None)
            return F.mul(TensorValue(x), self.factor * scale[0]) + weights[0]

    for call in (scaled, scaled_values, annotated, Layer().forward):
        seen.clear()
        for factor in (2.0, 3.0):
            for offset in (1.0, 5.0):
                scale[0], weights[0] = factor, Tensor([offset, 0.0])
                found = call(Tensor([1.0, 10.0]))
                assert found.to_numpy().tolist() == [factor + offset, 10 * factor]
        # the first call begins without a graph, and begins again where it needs one
        assert len(seen) in (4, 5)


class _Pair(NamedTuple):
    left: Any
    right: Any


def _result(draw: random.Random, depth: int, leaf: Any) -> tuple[Any, Any]:
    """A result of a function, and how it looks as nested lists of numbers."""
    kind = draw.randrange(7 if depth else 3)
    if kind == 0:
        number = draw.randrange(9)
        return leaf(number), [number]
    if kind == 1:
        return (text := draw.choice(["a", None, 3, 2.5, DType.int8])), text
    if kind == 2:
        number = draw.randrange(9)
        return Tensor([float(number)]), [number]
    parts = [_result(draw, depth - 1, leaf) for _ in range(2)]
    values, want = [p[0] for p in parts], [p[1] for p in parts]
    if kind == 3:
        return values, want
    if kind == 4:
        return tuple(values), tuple(want)
    if kind == 5:
        return _Pair(*values), _Pair(*want)
    return dict(zip("xy", values, strict=True)), dict(zip("xy", want, strict=True))


def _plain(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.to_numpy().tolist()
    if isinstance(result, tuple):
        items = [_plain(item) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    if isinstance(result, list):
        return [_plain(item) for item in result]
    if isinstance(result, dict):
        return {key: _plain(item) for key, item in result.items()}
    assert not isinstance(result, TensorValue)
    return result


@pytest.mark.parametrize("seed", range(12))
def test_results_of_every_structure(seed: int) -> None:
    leaves = [
        lambda n: ops.constant([float(n)], DType.float32, _CPU),
        lambda n: TensorValue(Tensor([float(n)])) + 0,
        lambda n: ops.add(Tensor([float(n - 1)]), 1.0),
        lambda n: Tensor.full([1], n),
    ]
    for leaf in leaves:
        draw = random.Random(seed)
        want: Any = None

        @F.functional
        def made(*args: Any, **kwargs: Any) -> Any:
            nonlocal want
            result, want = _result(draw, 3, leaf)  # noqa: B023
            return result

        found = made(3, [Tensor([1.0])], dtype=DType.float32)
        assert _plain(found) == want


def test_generators_become_lists() -> None:
    made = F.functional(lambda n: (ops.constant(float(i), DType.float32, _CPU) for i in range(n)))
    assert [x.item() for x in made(3)] == [0.0, 1.0, 2.0]
    values = F.functional(lambda x: (TensorValue(x) + i for i in range(3)))
    assert [x.item() for x in values(Tensor(1.0))] == [1.0, 2.0, 3.0]


def test_control_flow_and_branches() -> None:
    x, y = Tensor([1.0, 2.0]), Tensor([5.0])

    @F.functional
    def chosen(first: bool, x: Tensor) -> Any:
        # tensors of the enclosing scope, within branches
        return ops.cond(
            ops.constant(first, DType.bool, _CPU),
            [TensorType(DType.float32, (2,), _CPU)],
            lambda: TensorValue(x) + y,
            lambda: TensorValue(x) - y,
        )

    assert chosen(True, x)[0].to_numpy().tolist() == [6.0, 7.0]
    assert chosen(False, x)[0].to_numpy().tolist() == [-4.0, -3.0]
    (counted,) = F.functional(
        lambda: ops.while_loop(
            [ops.constant(3, DType.int32, _CPU)], lambda i: i < 9, lambda i: [i + 4]
        )
    )()
    assert counted.item() == 11


def test_buffers_of_its_own() -> None:
    @F.functional
    def stored(x: Tensor) -> Any:
        buffer = ops.buffer_create(BufferType(DType.float32, (2,), _CPU))
        ops.buffer_store(buffer, x)
        buffer[0] = 7.0
        return buffer[...], None

    found, none = stored(Tensor([1.0, 2.0]))
    assert none is None and found.to_numpy().tolist() == [7.0, 2.0]


def test_errors_are_those_of_the_function() -> None:
    def divides(x: Tensor) -> Any:
        TensorValue(x)
        return 1 / 0

    for function in (lambda x: 1 / 0, divides):
        with pytest.raises(ZeroDivisionError):
            F.functional(function)(Tensor([1.0]))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        F.functional(divides)()
    with pytest.raises(TypeError, match="functional: 3 is no function"):
        F.functional(3)  # type: ignore[arg-type]
    # outside of functional functions there is still no graph
    with pytest.raises(LookupError, match="no graph is being built"):
        _ = Graph.current
    with pytest.raises(TypeError, match="use max.experimental.functional"):
        TensorValue(Tensor([1.0]))


def test_attributes_of_the_wrapped_function() -> None:
    rule = list
    wrapped: Any = F.functional(divmod, rule=rule)
    assert wrapped.graph_op is divmod and wrapped.rule is rule
    assert wrapped(7, 2) == (3, 1)
