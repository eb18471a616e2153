"""Decides whether modules stage the same computation up to the values of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.graph import Weight
from max.nn.layer import Module

__all__ = ["groups_of_same_form", "same_form"]


def same_form(x: Module, y: Module) -> bool:
    """Whether one subgraph can serve both modules: equal classes, options, and types of weights.

    Attributes that are neither modules nor weights are compared with ``==``; values that cannot be compared count as
    different.
    """
    # a shared weight keeps its name, which the prefix of a call cannot change
    if type(x) is not type(y) or _shares_weights(x) or _shares_weights(y):
        return False
    return _same_parts(x, y) and _same_weights(x, y) and _same_options(x, y)


def _shares_weights(module: Module) -> bool:
    return bool(module.__dict__.get("_shared_weights"))


def _same_parts(x: Module, y: Module) -> bool:
    parts, others = x.sublayers, y.sublayers
    return parts.keys() == others.keys() and all(same_form(m, others[n]) for n, m in parts.items())


def _same_weights(x: Module, y: Module) -> bool:
    weights, others = x.layer_weights, y.layer_weights
    return weights.keys() == others.keys() and all(
        w.type == others[key].type
        and w.quantization_encoding is others[key].quantization_encoding
        and w.align == others[key].align
        for key, w in weights.items()
    )


def _options(module: Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, Module | Weight) and name != "layers"
    }


def _same_options(x: Module, y: Module) -> bool:
    options, others = _options(x), _options(y)
    if options.keys() != others.keys():
        return False
    for name, value in options.items():
        other = others[name]
        if value is other:
            continue
        try:
            equal = type(value) is type(other) and bool(value == other)
        except (TypeError, ValueError):
            # comparing arrays or graph values does not return a single bool
            return False
        if not equal:
            return False
    return True


def groups_of_same_form(modules: Sequence[Module]) -> list[int]:
    """For each module, the index of the first module with the same form."""
    firsts: list[int] = []
    result: list[int] = []
    for index, module in enumerate(modules):
        first = next((i for i in firsts if same_form(modules[i], module)), None)
        if first is None:
            firsts.append(index)
            first = index
        result.append(first)
    return result
