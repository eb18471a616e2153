"""`max.tree` on random nested values, against a plain walk over them; modules and caches as nodes."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from max import tree
from max.experimental.tensor import Tensor
from max.nn.module_v3 import Linear, Module, Sequential


class _Pair(NamedTuple):
    left: Any
    right: Any


@tree.dataclass
class _Fields:
    a: Any
    b: Any = None
    c: Any = 5


class _Named:
    """Made of its children."""

    def __init__(self, weight: Any, eps: Any) -> None:
        self.weight, self.eps = weight, eps

    def __tree_flatten__(self) -> tuple[dict[str, Any], Any]:
        return {"weight": self.weight}, self.eps

    @classmethod
    def __tree_unflatten__(cls, eps: Any, children: dict[str, Any]) -> _Named:
        return cls(children["weight"], eps)


class _Later:
    """Made before its children."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __tree_flatten__(self) -> tuple[list[Any], int]:
        return self.parts, len(self.parts)

    @classmethod
    def __tree_empty__(cls, count: int) -> _Later:
        return cls([None] * count)

    def __tree_setattr__(self, key: int, child: Any) -> None:
        self.parts[key] = child


def _drawn(draw: random.Random, depth: int) -> tuple[Any, list[tuple[str, Any]]]:
    """A nested value, and its leaves by their paths."""
    if depth == 0 or draw.random() < 0.25:
        leaf = draw.choice([
            lambda: draw.randrange(9), lambda: None, lambda: "s", lambda: 2.5, lambda: object(), lambda: {1, 2}, _Plain,
        ])()  # fmt: skip
        return leaf, [("", leaf)]
    parts = [_drawn(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
    kind = draw.randrange(9)
    keys: list[Any] = [str(n) for n in range(len(parts))]
    values = [value for value, _ in parts]
    match kind:
        case 0:
            made: Any = values
        case 1:
            made = tuple(values)
        case 2:
            keys = [f"k{n}" for n in range(len(parts))]
            made = dict(reversed(list(zip(keys, values, strict=True))))
        case 3:
            keys = [f"k{n}" for n in reversed(range(len(parts)))]
            made = OrderedDict(zip(keys, values, strict=True))
        case 4:
            keys = list(range(len(parts)))
            made = defaultdict(list, zip(keys, values, strict=True))
        case 5:
            parts, values, keys = (parts * 2)[:2], (values * 2)[:2], ["left", "right"]
            made = _Pair(*values)
        case 6:
            made = _Named(values[0], draw.randrange(9))
            parts, keys = parts[:1], ["weight"]
        case 7:
            made = _Later(values)
        case _:
            parts = [part for part in (parts * 3)[:3] if part[0] is not None] or [(1, [("", 1)])]
            made = _Fields(*[part[0] for part in parts], **({"c": None} if len(parts) < 3 else {}))
            keys = [str(n) for n in range(len(parts))]
    found = [
        (".".join(p for p in (str(key), path) if p), leaf)
        for key, (_, leaves) in zip(keys, parts, strict=True)
        for path, leaf in leaves
    ]
    return made, found


@dataclass
class _Plain:
    """A dataclass that is no node."""

    a: int = 1


@pytest.mark.parametrize("seed", range(60))
def test_random_values(seed: int) -> None:
    draw = random.Random(seed)
    value, want = _drawn(draw, 4)
    leaves, structure = tree.flatten(value)
    assert (
        [id(x) for x in leaves] == [id(x) for _, x in want] == [id(x) for x in tree.leaves(value)]
    )
    assert structure.num_leaves == len(want) and list(structure.leaf_paths) == [p for p, _ in want]
    assert list(tree.paths(value)) == [path for path, _ in want]
    # put together again, it has the same structure and other leaves
    numbers = list(range(len(leaves)))
    rebuilt = tree.unflatten(structure, numbers)
    assert type(rebuilt) is (type(value) if tree.is_node(value) else int)
    assert tree.flatten(rebuilt) == (numbers, structure)
    assert hash(tree.flatten(rebuilt)[1]) == hash(structure)
    assert tree.leaves(tree.map(lambda leaf, n: (leaf, n) and n, value, rebuilt)) == numbers
    with pytest.raises(ValueError, match="too few leaves"):
        tree.unflatten(structure, numbers[:-1])
    with pytest.raises(ValueError, match="more leaves"):
        tree.unflatten(structure, [*numbers, 1])
    assert tree.leaves(tree.unflatten(structure, [*numbers, 1], exact=False)) == numbers
    # leaves of one type: others belong to the structure
    whole, other = tree.flatten(rebuilt, leaf=lambda x: isinstance(x, int) and x % 2 == 0)
    assert whole == numbers[::2] and tree.leaves(tree.unflatten(other, whole)) == numbers
    # written in place
    written = [path for path, _ in want if draw.random() < 0.5]
    updated = _without_fields(rebuilt) and tree.update(rebuilt, {path: -1 for path in written})
    if updated:
        assert tree.leaves(updated) == [-1 if p in written else n for n, (p, _) in enumerate(want)]
    with pytest.raises(ValueError, match="no leaf at"):
        tree.update(rebuilt, {"nowhere": 1})


def _without_fields(value: Any) -> bool:
    """Whether no child is set by its number in a dataclass, which has no way to."""
    return not tree.nodes(value, _Fields) and tree.is_node(value)


def test_shared_objects() -> None:
    part, leaf = [1], object()
    both = [part, {"a": part, "b": leaf}, leaf]
    assert len(tree.leaves(both)) == 4 and len(tree.leaves(both, shared=True)) == 2
    assert list(tree.paths(both, shared=True)) == ["0.0", "1.b"]
    mapped = tree.map(lambda x: (x,), both, shared=True)
    assert mapped[0] is mapped[1]["a"] and mapped[1]["b"] is mapped[2]
    new = object()
    assert tree.update(both, {"1.b": new}, shared=True)[2] is new
    assert tree.leaves([7, 7], shared=True) == [7, 7]
    cycle: list[Any] = [1]
    cycle.append(cycle)
    with pytest.raises(ValueError, match="contains itself, at '1'"):
        tree.flatten(cycle)
    copied = tree.map(lambda x: x + 1, cycle, shared=True)
    assert copied[0] == 2 and copied[1] is copied


def test_errors() -> None:
    for value, kind, text in (
        ({"a": 1, 2: 3}, TypeError, "have no order"),
        ({"a.b": 1, "a": {"b": 2}}, ValueError, "two leaves have the path 'a.b'"),
    ):
        with pytest.raises(kind, match=text):
            tree.paths(value)
    with pytest.raises(TypeError, match="int is no node"):
        tree.flatten_one_level(3)
    with pytest.raises(TypeError, match=r"_Fields has no name; .*__tree_setattr__"):
        tree.update(_Fields(1), {"0": 5})
    for first, second in (([1, (2,)], [3, [4]]), ([1, 2], [3]), ({"a": 1}, {"b": 1})):
        with pytest.raises(ValueError, match="value 2 has another structure"):
            tree.map(lambda a, b: a, first, second)
    assert tree.map(lambda a, b: b, [1, None], [[2], 3]) == [[2], 3]
    assert [tree.extend_path(*p) for p in (("a", "b"), ("", "b"), ("a", ""), ("a", 3))] == [
        "a.b", "b", "a", "a.3",
    ]  # fmt: skip


class _Net(Module):
    def __init__(self) -> None:
        self.layers = [Linear(2, 3), Linear(3, 2)]
        self.tail = Sequential(Linear(2, 2), Linear(2, 1))
        self.scale, self.factor, self.none = Tensor.ones([2]), 5, None

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.tail(x * self.scale) * self.factor


def test_modules_are_nodes() -> None:
    net = _Net()
    weights = tree.paths(net, leaf=Tensor)
    assert set(dict(net.parameters)) <= set(weights)
    assert {"layers.1.weight", "tail.0.bias", "scale"} <= set(weights)
    assert tree.paths(net)["factor"] == 5 and "none" in tree.paths(net)
    assert set(tree.nodes(net, Module)) == {
        "", "layers.0", "layers.1", "tail", "tail.0", "tail.1",
    }  # fmt: skip
    assert not tree.is_node(net.scale)
    doubled = tree.map(lambda w: w * 2, net, leaf=Tensor)
    assert type(doubled) is _Net and doubled.tail is not net.tail and doubled.factor == 5
    x = Tensor.ones([1, 2])
    again = tree.unflatten(*reversed(tree.flatten(net, leaf=Tensor)))
    np.testing.assert_array_equal(again(x).to_numpy(), net(x).to_numpy())
    zeros = {"scale": Tensor.zeros([2]), "tail.0.bias": Tensor.zeros([2])}
    zero = tree.update(net, {**zeros, "tail.1.bias": Tensor.full([1], 3.0)})
    assert zero is net and net(x).to_numpy().tolist() == [[15.0]]
