"""Limits of JSON schemas beyond which llguidance takes minutes, or fails at the first token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from max.pipelines.core.exceptions import InputError

MAX_OPTIONAL_PROPERTIES = 498
"""The maximum number of optional properties of an object. Each takes 4 of the 2,000 items that llguidance tracks."""
MAX_MULTIPLES = 100_000
"""The maximum sum of all `multipleOf` values of a schema. Each remainder is an automaton state, which takes 10 µs and
is not covered by llguidance's limits."""
_EMBEDDED = re.compile(r"%json\b\s*")


def check_schema(schema: object) -> None:
    """Refuses a schema that llguidance cannot follow, or compiles too slowly.

    Args:
        schema: The schema, as JSON values.

    Raises:
        InputError: An object has too many optional properties, or the sum of ``multipleOf`` values is too large.
    """
    multiples = 0
    for node in _objects(schema):
        if (count := _optional(node)) > MAX_OPTIONAL_PROPERTIES:
            raise InputError(
                f"the JSON schema has an object of {count} optional properties",
                f"Give at most {MAX_OPTIONAL_PROPERTIES}, or list properties in `required`.",
            )
        multiples += remainders(node.get("multipleOf"))
        if multiples > MAX_MULTIPLES:
            raise InputError(
                f"the numbers of multipleOf in the JSON schema add up to more than {MAX_MULTIPLES}",
                "Give smaller ones; of 0.01 and the like the digits count.",
            )


def check_embedded_schemas(grammar: str) -> None:
    """Checks the schemas that are part of a grammar in Lark's syntax.

    Args:
        grammar: The grammar.

    Raises:
        InputError: As of `check_schema`.
    """
    for match in _EMBEDDED.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            continue  # inside a string or comment; otherwise llguidance refuses it
        check_schema(schema)


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    """All objects within a JSON value; iterative, as values may be deeply nested."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            yield item
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)


def _optional(node: Mapping[str, Any]) -> int:
    """The number of optional properties of a schema; the members of ``allOf`` belong to the same object."""
    members: Any = node.get("allOf")
    parts = [node, *(members if isinstance(members, list) else [])]
    names: set[str] = set()
    required: set[str] = set()
    for part in parts:
        if isinstance(part, Mapping):
            properties, listed = part.get("properties"), part.get("required")
            names |= set(properties) if isinstance(properties, Mapping) else set()
            required |= (
                {n for n in listed if isinstance(n, str)} if isinstance(listed, list) else set()
            )
    return len(names - required)


def remainders(divisor: object) -> int:
    """The number of remainders of a divisor; 0 if the value is not a valid divisor."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return 0
    exact = Decimal(divisor) if isinstance(divisor, int) else Decimal(repr(divisor))
    if not exact.is_finite():
        return 0
    # 0.25 has the remainders of 25: digits without their point
    digits, exponent = abs(exact).normalize().as_tuple()[1:]
    assert isinstance(exponent, int)
    if len(digits) + max(exponent, 0) > len(str(MAX_MULTIPLES)):
        return MAX_MULTIPLES + 1  # avoids computing numbers of arbitrary length
    return int("".join(map(str, digits))) * 10 ** max(exponent, 0)
