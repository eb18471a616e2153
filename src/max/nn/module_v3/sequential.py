"""Modules in lists and in sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from max.experimental.tensor import Tensor
from max.nn.module_v3.module import Module

__all__ = ["ModuleList", "Sequential"]


class ModuleList(Module, list[Module]):
    """A list of modules, which are its children: their names are their numbers, from 0."""

    @property
    def children(self) -> Iterable[tuple[str, Module]]:
        """Number and module of each child."""
        for index, module in enumerate(self):
            yield str(index), module

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def _shown(self) -> Iterator[tuple[str, object]]:
        for module in self:
            yield "", module


class Sequential(Module):
    """Applies modules of one argument in turn, each to the result of the one before.

    Args:
        modules: The modules. Their names are their numbers, from 0.
    """

    def __init__(self, *modules: Module) -> None:
        self.modules = list(modules)

    @property
    def children(self) -> Iterable[tuple[str, Module]]:
        """Number and module of each child."""
        for index, module in enumerate(self.modules):
            yield str(index), module

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the modules."""
        for module in self.modules:
            x = module(x)
        return x

    def __len__(self) -> int:
        return len(self.modules)

    def __getitem__(self, index: int) -> Module:
        return self.modules[index]

    def _shown(self) -> Iterator[tuple[str, object]]:
        for module in self.modules:
            yield "", module
