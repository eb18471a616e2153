"""Nested values: lists, tuples, dictionaries, dataclasses and the inputs of caches, and their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

__all__ = ["leaves", "map"]


def leaves(tree: object) -> list[Any]:
    """The leaves of a nested value, left to right; None has none.

    Args:
        tree: Lists, tuples, dictionaries (by their sorted keys), dataclasses and objects with a method ``flatten``, in
            any depth; all else is a leaf.
    """
    return list(_leaves(tree))


def _leaves(tree: object) -> Iterator[Any]:
    if tree is None:
        return
    if isinstance(tree, Mapping):
        for key in sorted(tree):
            yield from _leaves(tree[key])
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    elif hasattr(tree, "flatten") and not hasattr(tree, "shape"):
        yield from cast("Any", tree).flatten()
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _leaves(getattr(tree, field.name))
    else:
        yield tree


def map(f: Callable[..., Any], tree: object) -> Any:
    """A nested value of the same form, with a function applied to each leaf.

    Args:
        f: The function.
        tree: The value, as for `leaves`, without objects that have ``flatten``.
    """
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: map(f, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        items = [map(f, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [map(f, item) for item in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(
            tree, **{x.name: map(f, getattr(tree, x.name)) for x in fields(tree) if x.init}
        )
    return f(tree)
