"""Formats modules as trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Tree(Protocol):
    """The parts of a module that `module_tree` prints."""

    @property
    def layer_weights(self) -> Mapping[str, Any]:
        """Its own weights by name."""
        ...

    @property
    def sublayers(self) -> Mapping[str, Tree]:
        """Its parts by name."""
        ...


def module_tree(module: Tree) -> str:
    """The tree of a module: classes, and weights with dtype and shape. Adjacent equal parts are shown once."""
    return "\n".join(_lines(module))


def _lines(module: Tree) -> list[str]:
    body = [f"  {key}: {_weight(weight)}" for key, weight in module.layer_weights.items()]
    groups: list[tuple[list[str], list[str]]] = []
    for name, part in module.sublayers.items():
        lines = _lines(part)
        # only numbered parts count as repetitions
        if name.isdigit() and groups and groups[-1][0][-1].isdigit() and groups[-1][1] == lines:
            groups[-1][0].append(name)
        else:
            groups.append(([name], lines))
    for names, lines in groups:
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        times = "" if len(names) == 1 else f"{len(names)} x "
        body.append(f"  ({label}): {times}{lines[0]}")
        body.extend(f"  {line}" for line in lines[1:])
    name = type(module).__name__
    return [f"{name}(", *body, ")"] if body else [f"{name}()"]


def _weight(weight: Any) -> str:
    dims = ", ".join(str(dim) for dim in weight.shape)
    encoding = weight.quantization_encoding
    return f"{weight.dtype.name}[{dims}]" + (f" {encoding.value}" if encoding else "")
