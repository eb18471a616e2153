"""Shared by the families outside of graphs: descriptions of tensors, enums and devices, and lists of programs."""

from __future__ import annotations

import contextvars
import enum
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tests.differential.program import Family, dtype_name, evaluate


def describe(value: Any) -> str | None:
    """Text of tensors with their elements, of enums with their member, of devices, classes and NumPy's numbers."""
    if isinstance(value, enum.Enum) and type(value).__name__ != "DType":
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, bytes | complex | set | frozenset):
        return repr(value)
    if isinstance(value, type):
        return f"class {value.__name__}"
    names = [c.__name__ for c in type(value).__mro__]
    if "generic" in names:
        return f"scalar {value.dtype} {value.item()!r}"
    if "dtype" in names:
        return f"dtype {value.name}"
    if "Device" in names:
        return str(value)
    if hasattr(value, "element_size") and hasattr(value, "to_numpy"):
        try:
            elements = value.to_numpy().tolist()
        except Exception as error:
            elements = type(error).__name__
        # the class is Tensor in one version and Buffer in the next
        return f"tensor {dtype_name(value.dtype)} {tuple(value.shape)} {elements}"
    return None


def listed(text: str) -> list[str]:
    """The programs of a text, one a line; empty lines and comments are left out."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def plain_family(
    text: str,
    namespace: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    more: Callable[[int], list[str]] = lambda seed: [],
    first: Callable[[Any], str | None] = lambda value: None,
) -> Family:
    """A family of listed programs, and more that are drawn.

    Args:
        text: The programs, one a line.
        namespace: What their names mean, or a function that makes it at the first program.
        more: Programs from a seed.
        first: Descriptions that go before those of this module.
    """
    made: dict[str, Any] = {}

    def run(line: str) -> Any:
        if not made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    made.update(namespace() if callable(namespace) else namespace)
                except Exception as error:
                    # no answer of a program: the recorder is to stop
                    raise SystemExit(
                        f"the names of the programs cannot be made: {error}"
                    ) from error
        # a graph that a program of another family left open is not seen here
        return contextvars.Context().run(evaluate, line, made)

    return Family(
        programs=lambda seed: listed(text) + more(seed),
        run=run,
        describe=lambda value: first(value) or describe(value),
    )
