"""Keywords of JSON schemas that bounded automata hold: different items, an item of a kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import ceil, floor, isfinite
from typing import Any

from max.pipelines.structured.schemas.check import fitting, misfit
from max.pipelines.structured.schemas.merging import ASSERTIONS, value_key, well_formed
from max.pipelines.structured.schemas.references import References

__all__ = [
    "different_items",
    "lists_of_different",
    "number_of_values",
    "with_item",
    "with_items_of",
]

_ITEMS = frozenset(("type", "items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"))

_MOST_LISTS = 330
"""The maximum number of lists that are written out: all of five values."""
_MOST_INTEGERS = 16
"""The maximum number of integers between bounds that count as listed."""
_OTHER_TYPES = ("boolean", "null", "number", "object", "string")
_MOST_PLACES = 8
"""The maximum number of places where the first item of a kind may stand."""


def _choices(items: Any) -> Sequence[Any] | None:
    """The values of a schema; None if they are not listed."""
    if not isinstance(items, Mapping):
        return None
    asserted = set(items) & ASSERTIONS
    if "enum" in asserted and asserted <= {"enum", "type"} and isinstance(items["enum"], list):
        # a check of the whole schema would look for each value among all
        return fitting(items["enum"], {"type": items["type"]} if "type" in items else {})
    if "const" in asserted and asserted <= {"const", "type"}:
        return [items["const"]] if misfit(items["const"], items) is None else []
    kinds: Any = items.get("type")
    if asserted == {"type"}:
        listed = kinds if isinstance(kinds, list) else [kinds]
        values = {"boolean": [True, False], "null": [None]}
        if all(kind in ("boolean", "null") for kind in listed):
            return [value for kind in listed for value in values[kind]]
    return _integers(items) if asserted <= {"type", *_NUMBER_BOUNDS} else None


_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _integers(items: Mapping[str, Any]) -> Sequence[int] | None:
    """The integers between two bounds; None if they are many, or draft 4 has flags for bounds."""
    bounds = [items[name] for name in _NUMBER_BOUNDS if name in items]
    if items.get("type") != "integer" or not all(map(_is_number, bounds)):
        return None
    lower = [ceil(items["minimum"])] if "minimum" in items else []
    lower += [floor(items["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in items else []
    upper = [floor(items["maximum"])] if "maximum" in items else []
    upper += [ceil(items["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in items else []
    if not lower or not upper or min(upper) - max(lower) >= _MOST_INTEGERS:
        return None
    return range(max(lower), min(upper) + 1)


def _is_number(value: Any) -> bool:
    """Whether a value is a number that has a place among the integers."""
    return type(value) is int or (type(value) is float and isfinite(value))


def different_items(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The lists of a schema with ``uniqueItems``, written out; None if they are too many, or its items are not listed.

    Args:
        schema: The schema, whose items have no references.
    """
    if set(schema) & ASSERTIONS - {
        "type", "items", "prefixItems", "uniqueItems", "minItems", "maxItems"
    }:  # fmt: skip
        return None
    kinds = schema.get("type", ["array", *_OTHER_TYPES])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    prefix, items = schema.get("prefixItems", []), schema.get("items")
    if "array" not in kinds or isinstance(items, list):
        return None
    first = list(map(_choices, prefix))
    more = [] if items is False else _choices(items)
    # items after the listed places are forbidden
    if more is None and schema.get("maxItems", len(prefix) + 1) <= len(prefix):
        more = []
    if more is None or None in first:
        return None
    distinct = _distinct([value for each in (*first, more) for value in each or ()])
    longest = len(distinct) if more else min(len(prefix), len(distinct))
    least, most = schema.get("minItems", 0), schema.get("maxItems", longest)
    if not isinstance(least, int) or not isinstance(most, int):
        return None
    choices = [_distinct(each or ()) for each in first] + [_distinct(more)] * longest
    lists = _lists(choices, least, min(most, longest))
    others = [kind for kind in kinds if kind != "array"]
    if lists is None or not (lists or others):
        return None
    either = [{"enum": lists}] * bool(lists) + [{"type": others}] * bool(others)
    return {"anyOf": either} if len(either) > 1 else either[0]


def _lists(choices: Sequence[Mapping[str, Any]], least: int, most: int) -> list[list[Any]] | None:
    """Lists of different values, one of the choices of each place; None if they are too many."""
    found: list[list[Any]] = []
    level: list[dict[str, Any]] = [{}]
    for length in range(most + 1):
        if length:
            # a list bars as many values as it has
            if len(level) * (len(choices[length - 1]) - length + 1) > _MOST_LISTS:
                return None
            level = [
                {**head, key: value} for head in level for key, value in choices[length - 1].items() if key not in head
            ]  # fmt: skip
        if length >= least:
            found += [list(each.values()) for each in level]
        if len(level) > _MOST_LISTS or len(found) > _MOST_LISTS:
            return None
    return found


def number_of_values(items: Any) -> int | None:
    """How many different values a schema lists, which is the most that a list of different items has; None if it lists
    none.

    Args:
        items: The schema, without references.
    """
    values = _choices(items)
    return None if values is None else len(_distinct(values))


def _distinct(values: Sequence[Any]) -> dict[str, Any]:
    """The values by a key that those share which are equal in JSON."""
    found: dict[str, Any] = {}
    for value in values:
        found.setdefault(value_key(value), value)
    return found


def with_item(schema: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Alternatives of lists that have an item of the schema ``contains``; None if these do not say it.

    The first such item stands at one of the first places, which leaves out longer lists of others.

    Args:
        schema: The schema.
    """
    wanted, items = schema.get("contains"), schema.get("items")
    counted = schema.get("minContains", 1) != 1 or "maxContains" in schema
    if counted or "prefixItems" in schema or isinstance(items, list):
        return None
    if not isinstance(wanted, (Mapping, bool)):
        return None
    both = wanted if items is None or items is True else {"allOf": [items, wanted]}
    least, most = schema.get("minItems", 0), schema.get("maxItems", _MOST_PLACES)
    if not isinstance(least, int) or not isinstance(most, int):
        return None
    other: Any = True if items is None else items
    return [
        {
            "type": "array",
            "prefixItems": [*[other] * place, both],
            **({} if items is None else {"items": items}),
            "minItems": max(least, place + 1),
            **({"maxItems": most} if "maxItems" in schema else {}),
        }
        for place in range(min(most, _MOST_PLACES))
    ]


def with_items_of(schema: Mapping[str, Any], target: Any) -> dict[str, Any] | None:
    """Lists of which a reference says which items are evaluated, as one schema; None if they have no such form.

    Args:
        schema: The schema, with ``unevaluatedItems`` and without its reference.
        target: The schema to which it refers.
    """
    if not isinstance(target, Mapping):
        return dict(schema) if target is True else None
    other, wrong = well_formed(target)
    other = {name: value for name, value in other.items() if name in ASSERTIONS}
    if wrong or (schema.keys() | other.keys()) - _ITEMS or "unevaluatedItems" in other:
        return None
    pairs = ((schema, other), (other, schema))
    # `items` of one speaks of other places than that of two
    if any("items" in one and "prefixItems" in two for one, two in pairs):
        return None
    both = schema.keys() & other.keys()
    if any(isinstance(each.get("items"), list) for each in (schema, other)):
        return None
    if "type" in both and schema["type"] != other["type"]:
        return None
    made = {**other, **schema}
    if "minItems" in both:
        made["minItems"] = max(schema["minItems"], other["minItems"])
    if "maxItems" in both:
        made["maxItems"] = min(schema["maxItems"], other["maxItems"])
    if "items" in both:
        made["items"] = {"allOf": [other["items"], schema["items"]]}
    if "prefixItems" in both:
        pairs = zip_longest(other["prefixItems"], schema["prefixItems"], fillvalue=True)
        made["prefixItems"] = [{"allOf": list(pair)} for pair in pairs]
    return made


def lists_of_different(
    schema: Mapping[str, Any], references: References
) -> Mapping[str, Any] | None:
    """Lists of different items, written out or of no more items than there are values; None if neither is known.

    Args:
        schema: The schema of the lists, which has ``uniqueItems``.
        references: The schemas that it may refer to.
    """
    items, prefix = schema.get("items"), schema.get("prefixItems")
    if isinstance(items, Mapping):
        schema = {**schema, "items": references.resolve(items)}
    if isinstance(prefix, list):
        prefix = [references.resolve(e) if isinstance(e, Mapping) else e for e in prefix]
        schema = {**schema, "prefixItems": prefix}
    if (lists := different_items(schema)) is not None:
        return lists
    count = None if "prefixItems" in schema else number_of_values(schema.get("items"))
    if count is None or count < schema.get("minItems", 0):
        return None
    # which ones are there twice is not held
    return {**schema, "maxItems": min(schema.get("maxItems", count), count)}
