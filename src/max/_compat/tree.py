"""Nested values: taken apart into leaves and a structure, and put together again.

Nodes are lists, tuples (named ones too), dictionaries, modules of eager tensors, and objects whose class has
``__tree_flatten__``; all else is a leaf, None too. ``__tree_flatten__()`` returns children (a sequence, or a dictionary
whose keys name them) and further data; the classmethod ``__tree_unflatten__(data, children)`` makes an object of them.
Instead of it a class may have ``__tree_empty__(data)``, which makes an object without children, and
``__tree_setattr__(key, child)``, which sets one (`setattr` without it)::

    state = tree.paths(model, leaf=Tensor)          # {"layers.0.weight": ..., ...}
    tree.update(model, {"layers.0.weight": other}, leaf=Tensor)
    leaves, structure = tree.flatten(inputs)
    tree.unflatten(structure, [leaf * 2 for leaf in leaves])

Functions take `leaf`: a type, several, or a predicate. Values that it accepts are leaves, even nodes; leaves that it
does not accept belong to the structure. With `shared` an object in two places is one: its second place refers to the
first, so that it has its leaves once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from max._compat.tree_nodes import (
    PLAIN,
    Selector,
    as_predicate,
    dataclass,
    extend_path,
    flatten_one_level,
    is_node,
    kind_of,
    set_child,
)

__all__ = [
    "Selector", "Tree", "TreeDef", "as_predicate", "dataclass", "extend_path", "flatten", "flatten_one_level",
    "is_node", "leaves", "map", "nodes", "paths", "unflatten", "update",
]  # fmt: skip

_T = TypeVar("_T")
Tree: TypeAlias = Any
"""A nested value."""


@dataclasses.dataclass(frozen=True)
class TreeDef:
    """The structure of a nested value.

    Attributes:
        kind: ``leaf``, ``list``, ``tuple``, ``namedtuple``, ``dict``, ``node`` for objects, ``static`` for a value that
            is no leaf, ``ref`` for an object that has occurred before.
        children: The structures of the children.
        keys: Their keys; empty if they are numbered.
        meta: The class of a named tuple or dictionary, class and data of an object, a static value, the number of the
            object that a ``ref`` means.
    """

    kind: str
    children: tuple[TreeDef, ...] = ()
    keys: tuple[Any, ...] = ()
    meta: Any = dataclasses.field(default=None, hash=False)

    @property
    def child_keys(self) -> tuple[Any, ...]:
        """The key of each child; its number where there are no keys."""
        return self.keys or tuple(range(len(self.children)))

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return 1 if self.kind == "leaf" else sum(child.num_leaves for child in self.children)

    @property
    def leaf_paths(self) -> tuple[str, ...]:
        """The path of each leaf."""
        return tuple(_leaf_paths(self, ""))

    def flatten_up_to(self, tree: Tree) -> list[Any]:
        """The parts of a nested value where this structure has leaves.

        Args:
            tree: The value, which has the nodes of this structure and may have more in place of leaves.

        Raises:
            ValueError: It has another structure.
        """
        return list(_up_to(self, tree, ""))


_LEAF = TreeDef("leaf")


class _Walk:
    """A walk over a nested value, which yields its leaves and makes its structure.

    Args:
        leaf: What counts as a leaf; None: what is no node.
        shared: Whether an object in two places is one.
    """

    def __init__(self, leaf: Selector | None, shared: bool) -> None:
        self._accepts = as_predicate(leaf, lambda value: not is_node(value))
        self._shared = shared
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        self.values: list[tuple[str, Any]] = []
        self.nodes: list[tuple[str, Any]] = []
        """Every value in the order of the walk, nodes before their children."""
        self._alive: list[Any] = []

    def structure(self, value: Any, path: str = "") -> TreeDef:
        """The structure of a value."""
        # tuples are values: only what can be changed, or is no node, has an identity
        if self._shared and not isinstance(value, (*PLAIN, tuple)):
            number = self._numbers.get(id(value))
            if number is not None:
                return TreeDef("ref", meta=number)
            self._numbers[id(value)] = len(self.nodes)
            # an id belongs to a value as long as it lives, and children may be made anew
            self._alive.append(value)
        self.nodes.append((path, value))
        if self._accepts(value):
            self.values.append((path, value))
            return _LEAF
        kind = kind_of(value)
        if kind is None:
            return TreeDef("static", meta=value)
        if id(value) in self._open:
            raise ValueError(
                f"the value contains itself, at {path!r}; shared=True makes that place a reference"
            )
        self._open.add(id(value))
        children, keys, meta = flatten_one_level(value)
        self._alive.append(children)
        structures = tuple([
            self.structure(child, extend_path(path, key))
            for key, child in zip(keys or range(len(children)), children, strict=True)
        ])  # fmt: skip
        self._open.discard(id(value))
        if kind == "node":
            meta = (cast("type[Any]", type(value)), meta)
        return TreeDef(kind, structures, keys, meta)


def flatten(
    tree: Tree, *, leaf: Selector | None = None, shared: bool = False
) -> tuple[list[Any], TreeDef]:
    """The leaves of a nested value, left to right, and its structure.

    Args:
        tree: The value.
        leaf: What counts as a leaf.
        shared: Whether an object in two places is one.

    Raises:
        TypeError: The keys of a dictionary have no order.
        ValueError: The value contains itself, and `shared` is false.
    """
    walk = _Walk(leaf, shared)
    structure = walk.structure(tree)
    return [value for _, value in walk.values], structure


def leaves(tree: Tree, *, leaf: Selector | None = None, shared: bool = False) -> list[Any]:
    """The leaves of a nested value, left to right; see `flatten`."""
    return flatten(tree, leaf=leaf, shared=shared)[0]


def paths(tree: Tree, *, leaf: Selector | None = None, shared: bool = False) -> dict[str, Any]:
    """The leaves of a nested value by their paths; see `flatten`.

    Raises:
        ValueError: Two leaves have one path.
    """
    walk = _Walk(leaf, shared)
    walk.structure(tree)
    found: dict[str, Any] = {}
    for path, value in walk.values:
        if path in found:
            raise ValueError(f"two leaves have the path {path!r}, which names neither")
        found[path] = value
    return found


def nodes(
    tree: Tree,
    node_type: type[_T] | tuple[type[_T], ...],
    *,
    leaf: Selector | None = None,
    shared: bool = False,
) -> dict[str, _T]:
    """The values of a type in a nested value by their paths, the root at the empty path; see `flatten`.

    Args:
        tree: The value.
        node_type: The type, or several.
        leaf: What counts as a leaf.
        shared: Whether an object in two places is reported once.
    """
    walk = _Walk(leaf, shared)
    walk.structure(tree)
    return {path: value for path, value in walk.nodes if isinstance(value, node_type)}


def unflatten(treedef: TreeDef, leaves: Iterable[Any], *, exact: bool = True) -> Any:
    """A new nested value of a structure and its leaves.

    Args:
        treedef: The structure.
        leaves: The leaves, left to right.
        exact: Whether further leaves are an error.

    Raises:
        TypeError: A class of an object says not how one is made.
        ValueError: There are too few leaves, or too many.
    """
    values = iter(leaves)
    made: list[Any] = []
    count = treedef.num_leaves
    result = _build_tree(treedef, values, made, count)
    # `made` stands for the end, as no leaf is this list
    if exact and next(values, made) is not made:
        raise ValueError(f"there are more leaves than the {count} of the structure")
    return result


def _build_tree(treedef: TreeDef, values: Iterator[Any], nodes: list[Any], count: int) -> Any:
    if treedef.kind == "ref":
        if nodes[treedef.meta] is nodes:
            raise TypeError("an object that contains itself needs __tree_empty__ to be made")
        return nodes[treedef.meta]
    if treedef.kind == "leaf":
        try:
            value = next(values)
        except StopIteration:
            raise ValueError(f"there are too few leaves; the structure has {count}") from None
        nodes.append(value)
        return value
    if treedef.kind == "static":
        nodes.append(treedef.meta)
        return treedef.meta
    place = len(nodes)
    # the list itself marks a node that is not made yet
    nodes.append(nodes)
    empty = _empty(treedef)
    if empty is not None:
        nodes[place] = empty
    children = [_build_tree(child, values, nodes, count) for child in treedef.children]
    value = _fill_tree(treedef, empty, children)
    nodes[place] = value
    return value


def _empty(treedef: TreeDef) -> Any:
    """An object without its children, to which children may refer; None if it is made of them."""
    if treedef.kind == "list":
        return []
    if treedef.kind == "dict":
        if treedef.meta is None:
            return {}
        cls, made_of = treedef.meta
        return cls(*made_of)
    if treedef.kind == "node":
        cls, meta = treedef.meta
        if hasattr(cls, "__tree_empty__"):
            return cls.__tree_empty__(meta)
    return None


def _fill_tree(treedef: TreeDef, empty: Any, children: list[Any]) -> Any:
    match treedef.kind:
        case "list":
            empty.extend(children)
            return empty
        case "dict":
            empty.update(zip(treedef.keys, children, strict=True))
            return empty
        case "tuple":
            return tuple(children)
        case "namedtuple":
            return treedef.meta(*children)
        case _:
            cls, meta = treedef.meta
    keyed = dict(zip(treedef.keys, children, strict=True)) if treedef.keys else children
    if empty is not None:
        for key, child in zip(treedef.child_keys, children, strict=True):
            set_child(empty, key, child)
        return empty
    if not hasattr(cls, "__tree_unflatten__"):
        raise TypeError(
            f"{cls.__name__} says not how an object is made of its children: it needs the classmethod "
            "__tree_unflatten__(data, children), or __tree_empty__(data)"
        )
    return cls.__tree_unflatten__(meta, keyed)


def map(
    f: Callable[..., Any],
    tree: Tree,
    *rest: Tree,
    leaf: Selector | None = None,
    shared: bool = False,
) -> Any:
    """A new nested value of the same structure, with a function of each leaf; see `flatten`.

    Args:
        f: The function, of a leaf of each value.
        tree: The value.
        rest: More values, which have the nodes of the first and anything in place of its leaves.
        leaf: What counts as a leaf.
        shared: Whether an object in two places is one, and stays one.

    Raises:
        ValueError: A value of `rest` has another structure.
    """
    first, structure = flatten(tree, leaf=leaf, shared=shared)
    others: list[list[Any]] = []
    for number, other in enumerate(rest, 2):
        try:
            others.append(structure.flatten_up_to(other))
        except ValueError as error:
            raise ValueError(
                f"value {number} has another structure than the first: {error}"
            ) from None
    return unflatten(structure, [f(*items) for items in zip(first, *others, strict=True)])


def update(
    tree: Tree, state: Mapping[str, Any], *, leaf: Selector | None = None, shared: bool = False
) -> Any:
    """Replaces leaves of a nested value in place; the counterpart of `paths`.

    Args:
        tree: The value.
        state: New leaves by their paths; other leaves stay.
        leaf: What counts as a leaf.
        shared: Whether an object in two places is one: its new value is then set in each.

    Returns:
        The value; a new one if it is a tuple or a leaf itself.

    Raises:
        ValueError: A path is that of no leaf; nothing was written.
        TypeError: A child without a name is to be set, and its object has no ``__tree_setattr__``.
    """
    known = paths(tree, leaf=leaf, shared=shared)
    unknown = sorted(set(state) - set(known))
    if unknown:
        raise ValueError(f"update: there is no leaf at {unknown}; see paths(tree)")
    accepts = as_predicate(leaf, lambda value: not is_node(value))
    # the other places of a shared leaf
    replaced = {
        id(known[path]): value
        for path, value in state.items()
        if shared and not isinstance(known[path], PLAIN)
    }
    return _update_path(tree, "", state, accepts, replaced, {})


def _update_path(
    value: Any,
    path: str,
    state: Mapping[str, Any],
    accepts: Callable[[Any], bool],
    new_leaves: Mapping[int, Any],
    copies: dict[int, Any],
) -> Any:
    if accepts(value):
        return state[path] if path in state else new_leaves.get(id(value), value)
    kind = kind_of(value)
    if kind is None:
        return value
    if id(value) in copies:
        return copies[id(value)]
    # before its children, which may refer to it
    copies[id(value)] = value
    children, keys, _ = flatten_one_level(value)
    numbered = keys or tuple(range(len(children)))
    new = [
        _update_path(child, extend_path(path, key), state, accepts, new_leaves, copies)
        for key, child in zip(numbered, children, strict=True)
    ]
    changed = [
        (key, n) for key, n, old in zip(numbered, new, children, strict=True) if n is not old
    ]
    if kind in ("tuple", "namedtuple") and changed:
        copies[id(value)] = made = tuple(new) if kind == "tuple" else type(value)(*new)
        return made
    for key, child in changed:
        if kind == "node":
            set_child(value, key, child)
        else:
            value[key] = child
    return value


def _leaf_paths(treedef: TreeDef, path: str) -> Iterator[str]:
    if treedef.kind == "leaf":
        yield path
    for key, child in zip(treedef.child_keys, treedef.children, strict=True):
        yield from _leaf_paths(child, extend_path(path, key))


def _up_to(treedef: TreeDef, value: Any, path: str) -> Iterator[Any]:
    if treedef.kind == "leaf":
        yield value
        return
    if treedef.kind == "ref":
        return
    if treedef.kind == "static":
        if value is not treedef.meta and value != treedef.meta:
            raise ValueError(f"at {path!r}: expected {treedef.meta!r}, got {value!r}")
        return
    if kind_of(value) != treedef.kind:
        raise ValueError(f"at {path!r}: expected a {treedef.kind}, got {type(value).__name__}")
    children, keys, _ = flatten_one_level(value)
    if keys != treedef.keys or len(children) != len(treedef.children):
        raise ValueError(
            f"at {path!r}: expected the children {list(treedef.child_keys)}, got {list(keys) or len(children)}"
        )
    for key, structure, child in zip(treedef.child_keys, treedef.children, children, strict=True):
        yield from _up_to(structure, child, extend_path(path, key))
