"""`max._dataclass` against the standard library's dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import max._dataclass as quick

OPTIONS: list[dict[str, bool]] = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "eq": False},
    {"eq": False},
]


def point(decorate: Callable[..., Any], **options: bool) -> Any:
    class Point:
        x: int
        y: int = 2
        tags: list[str] = dataclasses.field(default_factory=list[str], compare=False)
        key: str = dataclasses.field(default="k", repr=False, hash=False, kw_only=True)
        order: int = dataclasses.field(default=7, init=False)
        seen: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "seen", self.x + 1)

    return decorate(Point, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_instances_are_those_of_the_standard_library(options: dict[str, bool]) -> None:
    ours, theirs = point(quick.dataclass, **options), point(dataclasses.dataclass, **options)
    for arguments, named in [((1,), {}), ((1, 3, ["a"]), {"key": "z"}), ((), {"x": 4})]:
        mine, other = ours(*arguments, **named), theirs(*arguments, **named)
        assert dataclasses.astuple(mine) == dataclasses.astuple(other)
        assert repr(mine) == repr(other)
        assert (mine == ours(*arguments, **named)) == (other == theirs(*arguments, **named))
        assert mine != other
        assert dataclasses.astuple(dataclasses.replace(mine, x=9)) == dataclasses.astuple(
            dataclasses.replace(other, x=9)
        )
        assert dataclasses.astuple(copy.copy(mine)) == dataclasses.astuple(mine)
        assert hasattr(mine, "__dict__") == hasattr(other, "__dict__")
    assert (ours(1) == ours(1, 3)) == (theirs(1) == theirs(1, 3))
    assert (ours(1) == ours(1, 2, ["b"])) == (theirs(1) == theirs(1, 2, ["b"]))
    assert ours(1).tags is not ours(1).tags
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    if options.get("frozen") and options.get("eq", True):
        assert hash(ours(1, key="a")) == hash(ours(1, key="b")) == hash(theirs(1))
        assert hash(ours(1)) != hash(ours(2))
    parameters = [inspect.signature(cls).parameters.values() for cls in (ours, theirs)]
    assert [(p.name, p.kind) for p in parameters[0]] == [(p.name, p.kind) for p in parameters[1]]
    assert ours.__match_args__ == theirs.__match_args__


@pytest.mark.parametrize("slots", [False, True])
def test_frozen_instances_refuse_changes(slots: bool) -> None:
    mine = point(quick.dataclass, frozen=True, slots=slots)(1)
    for change in (lambda: setattr(mine, "x", 2), lambda: delattr(mine, "x")):
        with pytest.raises(dataclasses.FrozenInstanceError, match="field 'x'"):
            change()
    assert mine.x == 1


@pytest.mark.parametrize("arguments", [(), (1, 2, [], 4)])
def test_wrong_arguments_are_refused_alike(arguments: tuple[Any, ...]) -> None:
    errors: list[str] = []
    for decorate in (quick.dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError) as error:
            point(decorate)(*arguments)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@quick.dataclass(frozen=True, slots=True)
class Base:
    """A base with a method of its own."""

    x: int

    def __repr__(self) -> str:
        return f"<{self.x}>"


@quick.dataclass(frozen=True, slots=True)
class Derived(Base):
    """A class whose fields follow those of its base."""

    y: tuple[int, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Derived) and self.x == other.x

    def __hash__(self) -> int:
        return 5


@quick.dataclass(frozen=True)
class Empty:
    """No fields."""


@quick.dataclass
class Node:
    """A value that holds itself."""

    next: Any = None


def test_inheritance_own_methods_and_pickles() -> None:
    derived = Derived(1, (2,))
    assert derived == Derived(1) != Derived(2) and hash(derived) == 5
    assert repr(derived) == "Derived(x=1, y=(2,))" and repr(Base(3)) == "<3>"
    assert Base(1) != Derived(1) and Base(1) == Base(1) != Base(2)
    again = pickle.loads(pickle.dumps(derived))
    assert (again.x, again.y) == (1, (2,)) and type(again) is Derived
    assert Empty() == Empty() and repr(Empty()) == "Empty()" and hash(Empty()) == hash(())
    node = Node()
    node.next = node
    assert repr(node) == "Node(next=...)"


def test_classes_outside_may_add_attributes_to_frozen_ones() -> None:
    class Loose(Empty):
        pass

    loose = Loose()
    loose.extra = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert vars(loose) == {"extra": 1}
    del loose.extra  # pyright: ignore[reportAttributeAccessIssue]
    assert vars(loose) == {}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("decorate", [dataclasses.dataclass, quick.dataclass])
def test_a_copy_with_other_values(decorate: Callable[..., Any], frozen: bool) -> None:
    class Pair:
        x: int
        tags: list[str] = dataclasses.field(default_factory=list[str])

    kind: Any = decorate(Pair, frozen=frozen)
    first = kind(1, ["a"])
    for changes in ({}, {"x": 3}, {"x": 3, "tags": ["b"]}):
        copied = quick.replace_fields(first, **changes)
        assert copied == dataclasses.replace(first, **changes)
        assert type(copied) is kind and copied is not first
    assert first == kind(1, ["a"])
    with pytest.raises(TypeError, match="Pair has no field z"):
        quick.replace_fields(first, z=1)
