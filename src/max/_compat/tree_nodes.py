"""Nodes of nested values: what they are, their children, and how one is made of its children."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

__all__ = [
    "PLAIN", "Selector", "as_predicate", "dataclass", "extend_path", "flatten_one_level", "is_node", "kind_of",
    "set_child",
]  # fmt: skip

_T = TypeVar("_T")
Selector: TypeAlias = type | tuple[type, ...] | Callable[[Any], bool]
"""What counts as a leaf: a type, several, or a predicate."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Values without an identity of their own, which are not shared."""


def as_predicate(
    selector: Selector | None, default: Callable[[Any], bool]
) -> Callable[[Any], bool]:
    """A predicate for a selector.

    Args:
        selector: A type, several, a predicate, or None.
        default: The predicate for None.
    """
    if selector is None:
        return default
    if isinstance(selector, type | tuple):
        kinds = selector
        return lambda value: isinstance(value, kinds)
    return selector


def extend_path(path: str, key: Any) -> str:
    """A path with a further key; an empty one adds nothing.

    Args:
        path: The path; empty for the root.
        key: The key.
    """
    text = str(key)
    return f"{path}.{text}" if path and text else path or text


def is_node(value: Any) -> bool:
    """Whether a value is a node.

    Args:
        value: Any value.
    """
    return kind_of(value) is not None


def kind_of(value: Any) -> str | None:
    """The kind of a node: list, tuple, namedtuple, dict, or node for an object; None for what is no node."""
    cls = cast("type[Any]", type(value))
    if hasattr(cls, "__tree_flatten__"):
        return "node"
    # not subclasses: how one is made of children is not known
    if cls is list or cls is tuple:
        return cls.__name__
    if cls in (dict, OrderedDict, defaultdict):
        return "dict"
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return "namedtuple"
    return None


def flatten_one_level(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """The children of a node, their keys (none if they are numbered), and its data.

    Args:
        value: The node.

    Raises:
        TypeError: It is none, or a dictionary whose keys have no order.
    """
    kind = kind_of(value)
    if kind is None:
        raise TypeError(f"{type(value).__name__} is no node of a tree: {value!r}")
    if kind == "namedtuple":
        return tuple(value), tuple(value._fields), type(value)
    if kind == "dict":
        keys = tuple(_ordered_keys(value))
        if type(value) is dict:
            return tuple([value[key] for key in keys]), keys, None
        made_of = (value.default_factory,) if isinstance(value, defaultdict) else ()
        return tuple([value[key] for key in keys]), keys, (type(value), made_of)
    if kind != "node":
        return tuple(value), (), None
    children, meta = value.__tree_flatten__()
    if isinstance(children, Mapping):
        named = cast("Mapping[Any, Any]", children)
        return tuple(named.values()), tuple(named), meta
    return tuple(cast("Sequence[Any]", children)), (), meta


def _ordered_keys(value: dict[Any, Any]) -> list[Any]:
    if isinstance(value, OrderedDict):
        return list(cast("OrderedDict[Any, Any]", value))
    try:
        return sorted(value)
    except TypeError as error:
        raise TypeError(
            f"the keys {list(value)!r} of a dictionary have no order, which a structure needs; use keys of one type"
        ) from error


def set_child(owner: Any, key: Any, child: Any) -> None:
    """Sets a child of an object."""
    if hasattr(owner, "__tree_setattr__"):
        owner.__tree_setattr__(key, child)
    elif isinstance(key, str):
        setattr(owner, key, child)
    else:
        raise TypeError(
            f"child {key!r} of {type(owner).__name__} has no name; the class needs __tree_setattr__(key, child)"
        )


def dataclass(
    cls: type[_T] | None = None, /, **kwargs: Any
) -> type[_T] | Callable[[type[_T]], type[_T]]:
    """Makes a class a dataclass whose objects are nodes; their children are the fields that are not None.

    Args:
        cls: The class; None where the decorator has arguments.
        kwargs: Arguments of `dataclasses.dataclass`, for a class that is no dataclass yet.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        made: Any = cls
        if kwargs or "__dataclass_fields__" not in vars(cls):
            made = dataclasses.dataclass(**kwargs)(cls)
        made.__tree_flatten__ = _flatten_fields
        made.__tree_unflatten__ = classmethod(_unflatten_fields)
        return made

    return decorate if cls is None else decorate(cls)


def _names(value: Any) -> tuple[str, ...]:
    return tuple([
        field.name
        for field in dataclasses.fields(value)
        if getattr(value, field.name, None) is not None
    ])  # fmt: skip


def _flatten_fields(self: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    present = _names(self)
    return tuple([getattr(self, name) for name in present]), present


def _unflatten_fields(cls: Any, present: tuple[str, ...], children: Iterable[Any]) -> Any:
    given = dict(zip(present, children, strict=True))
    fields = dataclasses.fields(cls)
    made = cls(**{field.name: given.get(field.name) for field in fields if field.init})
    for field in fields:
        if not field.init:
            # frozen ones refuse `setattr`
            object.__setattr__(made, field.name, given.get(field.name))
    return made
