"""A call follows a step of a trace where its arguments stage the same: random arguments, compared one by one."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max.experimental import Tensor
from max.experimental.programs.number_patterns import Symbol
from max.experimental.replay import replays
from max.experimental.replay.matching import matcher
from max.experimental.replay.replays import Replay
from max.experimental.replay.specifications import Nested, VaryingLeaf, VaryingNumber
from max.experimental.replay.traces import Capture
from max.graph.dim import StaticDim
from max.mlir.conditions import Condition

TENSORS = [Tensor.constant([1.0, 2.0]), Tensor.constant([3.0, 4.0]), Tensor.constant([5.0])]
PLAIN: list[Any] = [
    0, 1, 2, -1, 0.0, -0.0, 1.0, 0.5, True, False, None, "a", "b", StaticDim(1), StaticDim(2),
    np.float32(0.0), np.float32(-0.0), np.float32(1), np.float64(0.0), np.float64(-0.0), np.int64(1),
]  # fmt: skip


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.random()
    if depth and kind < 0.3:
        items = [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
        return items if rng.random() < 0.5 else tuple(items)
    if depth and kind < 0.4:
        return slice(*[rng.choice(PLAIN) for _ in range(3)])
    return rng.choice(TENSORS) if kind < 0.6 else rng.choice(PLAIN)


def varied(rng: random.Random, given: Any) -> Any:
    """A copy with about one change."""
    if rng.random() < 0.15:
        return value(rng, 1)
    if isinstance(given, list | tuple):
        items = [varied(rng, item) if rng.random() < 0.4 else item for item in given]
        if rng.random() < 0.1:
            items.append(rng.choice(PLAIN))
        if items and rng.random() < 0.1:
            items.pop()
        container = rng.choice((list, tuple)) if rng.random() < 0.1 else type(given)
        return container(items)
    return given if isinstance(given, Tensor) else copy.copy(given)


def replay() -> Replay:
    return Replay(SimpleNamespace(steps=(), followed_steps=(), symbolic=None, conditions=[]))  # type: ignore[arg-type]


def test_the_number_of_open_replays_is_bounded() -> None:
    replays.settle_all()
    earlier = [replay() for _ in range(replays._MOST_REPLAYS)]
    assert not any(each._closed for each in earlier)
    last = replay()
    assert all(each._closed for each in earlier) and not last._closed
    replays.settle_all()


class Pairs:
    """Compares two calls argument by argument."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []

    def alike(self, a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
                return False
            for index, seen in enumerate(self.before):
                if seen is a:
                    return self.after[index] is b
            self.before.append(a)
            self.after.append(b)
            return a.shape == b.shape
        if isinstance(a, slice) and isinstance(b, slice):
            return self.alike([a.start, a.stop, a.step], [b.start, b.stop, b.step])
        if isinstance(a, list | tuple):
            if type(a) is not type(b) or len(a) != len(b):
                return False
            return all(self.alike(x, y) for x, y in zip(a, b, strict=True))
        a, b = (int(x) if isinstance(x, StaticDim) else x for x in (a, b))
        return type(a) is type(b) and repr(a) == repr(b)


def test_random_calls_match_where_they_stage_the_same() -> None:
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(6000):
        names = rng.sample(["axis", "k", "out"], rng.randint(0, 2))
        args = [value(rng) for _ in range(rng.randint(0, 3))]
        kwargs = {name: value(rng) for name in names}
        capture = Capture()
        specs = [capture._spec(arg) for arg in args]
        keywords = [(name, capture._spec(arg)) for name, arg in kwargs.items()]
        new = [varied(rng, arg) if rng.random() < 0.5 else arg for arg in args]
        named = {n: varied(rng, a) if rng.random() < 0.5 else a for n, a in kwargs.items()}
        if rng.random() < 0.05:
            new.append(1)
        if rng.random() < 0.05:
            named["more"] = 1
        if len(named) > 1 and rng.random() < 0.2:
            named = dict(reversed(named.items()))
        pairs = Pairs()
        expected = (
            len(new) == len(args)
            and list(named) == list(kwargs)
            and pairs.alike([*args, *kwargs.values()], [*new, *named.values()])
        )
        followed = replay()
        match, given = matcher(specs, keywords)
        try:
            matched = match(followed, tuple(new), named, given)
        except AttributeError:  # a number where a tensor was
            matched = False
        assert matched == expected, (args, kwargs, new, named)
        if matched:
            assert [cell for cell in followed.values] == [t._cell for t in pairs.after]
        outcomes[expected] += 1
        followed.settle()
    assert min(outcomes.values()) > 1000, outcomes


@pytest.mark.parametrize("nested", [False, True])
def test_a_nan_matches_itself(nested: bool) -> None:
    """It is the same constant, though it does not equal itself; another one may have other bits."""
    nan = float("nan")
    spec: Any = Nested(list, ((nan,), (1,))) if nested else (nan,)
    match, specs = matcher([spec], [])
    followed = replay()
    for value, expected in ((nan, True), (float("nan"), False), (1.0, False)):
        assert match(followed, ([value, 1] if nested else value,), {}, specs) == expected
    followed.settle()


@pytest.mark.parametrize("symbol", [Symbol(0), Symbol(0, 3, 2), Symbol(0, 2, -1), Symbol(0, 1, 3)])
def test_a_number_that_varies_binds_its_symbol_once(symbol: Symbol) -> None:
    def matches(values: list[int], conditions: list[Condition]) -> bool:
        trace = SimpleNamespace(steps=(), followed_steps=(), symbolic=None, conditions=conditions)
        followed = Replay(trace)  # type: ignore[arg-type]
        results = [followed.matches(v, VaryingNumber(symbol, int)) for v in values]
        if all(results) and values:
            assert followed._sizes["s0"] * symbol.factor + symbol.offset == values[0]
        followed.settle()
        return all(results)

    for number in range(-6, 12):
        base = (number - symbol.offset) / symbol.factor
        fits = number >= 0 and base >= 0 and base == int(base)
        assert matches([number], []) == fits
        assert matches([number, number], []) == fits
        assert not matches([number, number + 1], [])
    followed = replay()
    for other in (2.0, True, "2", None):
        assert not followed.matches(other, VaryingNumber(symbol, int))
    followed.settle()


def test_a_tensor_in_a_list_has_to_be_in_memory() -> None:
    x = TENSORS[0]
    match, specs = matcher([Nested(list, (x._cell.type, (1,)))], [])
    followed = replay()
    pending = x + 1
    for tensor, expected in ((x, True), (pending, False), (TENSORS[2], False), (TENSORS[1], True)):
        assert match(followed, ([tensor, 1],), {}, specs) == expected
    assert followed.values == [x._cell, TENSORS[1]._cell]
    followed.settle()
    _ = pending.realize


def test_a_float_that_varies() -> None:
    spec = VaryingNumber(Symbol(0), float)
    for number, expected in [
        (0.5, True),
        (-2.5, True),
        (0.0, False),
        (-0.0, False),
        (float("nan"), False),
        (3, False),
    ]:
        followed = replay()
        assert followed.matches(number, spec) == expected, number
        if expected:
            assert followed.matches(number, spec) and not followed.matches(number + 1, spec)
        followed.settle()


def test_a_tensor_whose_sizes_vary() -> None:
    x = Tensor.constant(np.ones((4, 3, 9), np.float32))
    cell_type = x._cell.type
    for dims, expected in [
        ((Symbol(0), 3, Symbol(0, 2, 1)), True),
        ((Symbol(0), 3, Symbol(0, 2, 2)), False),
        ((Symbol(0), 2, Symbol(1)), False),
        ((4, 3, 9), True),
    ]:
        followed = replay()
        assert followed.matches(x, VaryingLeaf(cell_type.kind, dims)) == expected
        assert [cell is x._cell for cell in followed.values] == [True] * expected
        pending = x * 2
        assert not followed.matches(pending, VaryingLeaf(cell_type.kind, dims))
        other = Tensor.constant(np.ones((4, 3, 9), np.float64))
        assert not followed.matches(other, VaryingLeaf(cell_type.kind, dims))
        followed.settle()
        _ = pending.realize
