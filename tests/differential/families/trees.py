"""`max.tree`, which 25.7 has not: nested values of every kind under each function."""

from __future__ import annotations

import collections
from random import Random
from typing import Any, NamedTuple

from tests.differential.program import Family, evaluate


class P(NamedTuple):
    a: Any
    b: Any


class W:
    """A node whose children have names."""

    def __init__(self, w: Any, e: Any) -> None:
        self.w, self.e = w, e

    def __tree_flatten__(self) -> tuple[dict[str, Any], Any]:
        return {"w": self.w}, self.e

    @classmethod
    def __tree_unflatten__(cls, e: Any, children: dict[str, Any]) -> W:
        return cls(children["w"], e)

    def __repr__(self) -> str:
        return f"W({self.w!r}, {self.e!r})"


class E:
    """A node that is made before its children."""

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)

    def __tree_flatten__(self) -> tuple[list[Any], int]:
        return self.parts, len(self.parts)

    @classmethod
    def __tree_empty__(cls, count: int) -> E:
        return cls(*[None] * count)

    def __tree_setattr__(self, key: int, child: Any) -> None:
        self.parts[key] = child

    def __repr__(self) -> str:
        return f"E{tuple(self.parts)!r}"


class L(list):  # pyright: ignore[reportMissingTypeArgument]
    """A list of its own class is no node."""


CALLS = [
    "tree.leaves({v})",
    "tree.paths({v})",
    "tree.map(lambda x: (x,), {v})",
    "tree.is_node({v})",
    "tree.flatten_one_level({v})",
    "tree.leaves({v}, leaf=int)",
    "tree.leaves({v}, leaf=(str, list))",
    "tree.map(str, {v}, leaf=int)",
    "f, d = tree.flatten({v}); tree.unflatten(d, f)",
    "f, d = tree.flatten({v}); (d.num_leaves, d.leaf_paths, d.kind, d.keys, d.child_keys)",
    "f, d = tree.flatten({v}); tree.unflatten(d, f[1:])",
    "f, d = tree.flatten({v}); tree.unflatten(d, f + [1])",
    "f, d = tree.flatten({v}); tree.unflatten(d, f + [1], exact=False)",
    "tree.update({v}, {{'0': 7}})",
    "tree.update({v}, {{'a': 7}})",
    "tree.update({v}, {{'b.0': 7}})",
    "tree.nodes({v}, list)",
    "tree.nodes({v}, (int, dict))",
    "tree.map(lambda x, y: (x, y), {v}, {w})",
    "tree.flatten({v})[1] == tree.flatten({w})[1]",
    "tree.flatten({v})[1].flatten_up_to({w})",
    "x = {v}; tree.leaves([x, x], shared=True)",
    "x = {v}; r = tree.map(lambda y: y, [x, x], shared=True); r[0] is r[1]",
    "x = {v}; tree.paths([x, x], shared=True)",
]
OTHERS = [
    "x = [1]; x.append(x); tree.leaves(x)",
    "x = [1]; x.append(x); tree.leaves(x, shared=True)",
    "[tree.extend_path(a, b) for a in ('', 'a', 'a.b') for b in ('', 'c', 3, None)]",
    "tree.as_predicate(int, lambda v: False)(3), tree.as_predicate(None, lambda v: v)(0)",
    "tree.leaves(TD(1))",
    "tree.paths(TD([1, 2], None, None))",
    "tree.map(lambda v: v + 1, TD(1, 2))",
    "tree.map(lambda v: v, TD(1, None, None))",
    "tree.update(TD(1), {'0': 2})",
    "TD(3).__tree_flatten__()",
    "tree.map(lambda a, b: (a, b), TD(1, 2), TD(3, 4))",
    "tree.map(lambda a, b: (a, b), TD(1, 2), TD(3))",
]


def nested(draw: Random, depth: int) -> str:
    """A nested value as source code."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(["1", "2", "None", "'s'", "2.5", "True", "L([1])", "{1, 2}"])
    parts = [nested(draw, depth - 1) for _ in range(draw.randrange(3))]
    first, second = (*parts, "3", "4")[:2]
    return draw.choice(
        [
            f"[{', '.join(parts)}]",
            f"({', '.join(parts)}{',' if len(parts) == 1 else ''})",
            f"{{'b': {first}, 'a': {second}}}",
            f"{{2: {first}, 1: {second}}}",
            f"O(b={first}, a={second})",
            f"DD(int, b={first}, a={second})",
            f"P({first}, {second})",
            f"W({first}, 9)",
            f"E({', '.join(parts)})",
            f"{{'a': {first}, 3: {second}}}",
        ]
    )


def programs(seed: int) -> list[str]:
    draw = Random(seed)
    lines = [call.format(v=nested(draw, 3), w=nested(draw, 2)) for call in CALLS for _ in range(16)]
    for call in CALLS[18:21]:
        for _ in range(6):
            value = nested(draw, 3)
            lines.append(call.format(v=value, w=value))
    return list(dict.fromkeys([*lines, *OTHERS]))


def run(line: str) -> Any:
    from max import tree

    @tree.dataclass
    class TD:
        a: Any
        b: Any = None
        c: Any = 5

    names = {"tree": tree, "P": P, "W": W, "E": E, "L": L, "TD": TD}
    value = evaluate(line, {**names, "O": collections.OrderedDict, "DD": collections.defaultdict})
    return repr(value).replace("run.<locals>.", "")


FAMILY = Family(programs=programs, run=run)
