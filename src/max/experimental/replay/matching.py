"""Compares calls with steps of a trace, by functions that are generated for the kinds of a step's arguments.

A loop over the specifications would take longer than the comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from max._host.process_caches import cached_results
from max.experimental.programs.value_types import CellType
from max.experimental.replay.specifications import Nested, same_constant
from max.graph.dim import StaticDim

__all__ = ["Match", "matcher"]

Match = Callable[[Any, tuple[Any, ...], dict[str, Any], tuple[Any, ...]], bool]
"""Whether the arguments and keyword arguments of a replay's call match specifications; the tensors in memory
that are new become values of the replay. Raises AttributeError for a number in place of a tensor."""

_PLAIN = frozenset({int, str, bool, type(None), StaticDim})
"""Types whose values are the same constant if their types are the same and ``==`` holds."""


def matcher(
    args: Sequence[Any], keywords: Sequence[tuple[str, Any]]
) -> tuple[Match, tuple[Any, ...]]:
    """The function that compares calls with a step, and the specifications to give it.

    Args:
        args: The specifications of the arguments.
        keywords: Names and specifications of the keyword arguments.
    """
    pairs = [_kind(spec) for spec in [*args, *[spec for _, spec in keywords]]]
    pattern = "".join([kind for kind, _ in pairs])
    return (
        _match(pattern, tuple([name for name, _ in keywords])),
        tuple([spec for _, spec in pairs]),
    )


def _kind(spec: Any) -> tuple[str, Any]:
    """The letter of a specification in patterns, and the part of it that the generated code reads."""
    if type(spec) is int:
        return "v", spec
    if type(spec) is tuple:
        return "c", spec[0]
    if isinstance(spec, CellType):
        return "m", spec
    if isinstance(spec, Nested) and spec.cls in (list, tuple):
        values = [item[0] for item in spec.items if type(item) is tuple]
        types = tuple([type(value) for value in values])
        if len(values) == len(spec.items) and _PLAIN.issuperset(types):
            return "p", (spec.cls, types, spec.cls(values), spec)
    return "o", spec


_TESTS = {
    # a value of the replay
    "v": ["if {a}._cell is not values[{s}]: return False"],
    # a tensor in memory
    "m": [
        "cell = {a}._cell",
        "if cell.type is not {s} or cell.storage is None: return False",
        "values.append(cell)",
    ],
    "c": ["if {a} is not {s} and not same_constant({a}, {s}): return False"],
    # a list or tuple of plain constants; types are compared first, as == of a tensor would be recorded as a call
    "p": [
        "if type({a}) is not {s}[0] or tuple(map(type, {a})) != {s}[1] or {a} != {s}[2]:",
        "    if not replay.matches({a}, {s}[3]): return False",
    ],
    "o": ["if not replay.matches({a}, {s}): return False"],
}


@cached_results(4096)
def _match(pattern: str, names: tuple[str, ...]) -> Match:
    positional = len(pattern) - len(names)
    wrong = [f"len(args) != {positional}", f"tuple(kwargs) != {names!r}" if names else "kwargs"]
    lines = [f"if {' or '.join(wrong)}: return False"]
    for left, right, numbers in (
        ("a", "args", range(positional)),
        ("a", "kwargs.values()", range(positional, len(pattern))),
        ("s", "specs", range(len(pattern))),
    ):
        if numbers:
            lines.append(f"{', '.join(f'{left}{number}' for number in numbers)}, = {right}")
    lines.append("values = replay.values")
    for number, kind in enumerate(pattern):
        lines += [test.format(a=f"a{number}", s=f"s{number}") for test in _TESTS[kind]]
    body = "".join(f"    {line}\n" for line in [*lines, "return True"])
    scope: dict[str, Any] = {"same_constant": same_constant}
    exec(compile(f"def match(replay, args, kwargs, specs):\n{body}", "<match>", "exec"), scope)
    return scope["match"]
