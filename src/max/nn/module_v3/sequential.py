"""Modules in lists and in sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from max.experimental.tensor import Tensor
from max.nn.module_v3.module import Module

__all__ = ["ModuleList", "Sequential"]


class ModuleList(Module, list[Module]):
    """A list of modules, which are its children, named by their indices from 0."""

    @property
    def children(self) -> Iterable[tuple[str, Module]]:
        """Index and module of each child."""
        for index, module in enumerate(self):
            yield str(index), module

    def __tree_flatten__(self) -> tuple[dict[str, Any], None]:
        """The modules and the attributes, as children of a node of `max.tree`."""
        modules: dict[str, Any] = dict(self.children)
        return modules | vars(self), None

    def __tree_setattr__(self, key: str, child: Any) -> None:
        """Sets a module by its index, or an attribute, for `max.tree`."""
        if not key.isdecimal():
            setattr(self, key, child)
        elif int(key) < len(self):
            self[int(key)] = child
        else:
            self.append(child)

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        for module in self:
            yield "", module


class Sequential(ModuleList):
    """A list of modules with one argument, applied in turn, each to the result of the previous one.

    Args:
        modules: The modules, named by their indices from 0.
    """

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    @property
    def modules(self) -> list[Module]:
        """The modules."""
        return list(self)

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the modules."""
        for module in self:
            x = module(x)
        return x
