"""Keywords of JSON schemas, and schemas of objects that become one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KEPT = (
    "type", "enum", "const", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minItems", "maxItems", "required", "minProperties", "maxProperties",
)  # fmt: skip
DROPPED = ("propertyNames", "uniqueItems", "contains", "unevaluatedProperties", "unevaluatedItems")
CONDITIONS = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies")
POINTERS = ("$ref", "$dynamicRef", "$recursiveRef")
MERGED = frozenset(("type", "properties", "required", "additionalProperties", "patternProperties"))
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BRANCHES = 24
"""The maximum number of alternatives that are written in another form."""

ASSERTIONS = frozenset((
    *KEPT, *DROPPED, *CONDITIONS, *MERGED, "pattern", "format", "multipleOf", "items", "prefixItems",
    "additionalItems", "allOf", "anyOf", "oneOf", *POINTERS, "then", "else", "minContains", "maxContains",
))  # fmt: skip


def is_condition(schema: Any) -> bool:
    """Whether a member of ``allOf`` has only conditions.

    Args:
        schema: The member.
    """
    if not isinstance(schema, Mapping):
        return False
    own = schema.keys() & ASSERTIONS
    return bool(own) and own <= {*CONDITIONS, "then", "else"}


def condition_base(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a condition may know of the values.

    Args:
        schema: The schema around it.
    """
    return {name: schema[name] for name in ("type", "properties", "enum") if name in schema}


def names_in(schema: Mapping[str, Any], keyword: str) -> list[str]:
    """The names of properties that a keyword lists; a client may send no list.

    Args:
        schema: The schema.
        keyword: ``properties`` or ``required``.
    """
    value = schema.get(keyword)
    return [n for n in value if isinstance(n, str)] if isinstance(value, (Mapping, list)) else []


def combines(schema: Mapping[str, Any]) -> bool:
    """Whether an object may have properties of other schemas that apply to it.

    Args:
        schema: The schema of the object.
    """
    for keyword in ("allOf", "anyOf", "oneOf"):
        for each in schema.get(keyword) or ():
            if is_condition(each):
                continue
            if not isinstance(each, Mapping) or set(each) & (ASSERTIONS - {"required", "type"}):
                return True
    return False


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any] | None:
    """Two schemas of an object in one; None where they have the same keyword.

    Args:
        first: A schema.
        second: Another.
    """
    if _narrows(first, second) or _narrows(second, first):
        return None
    merged = dict(first)
    for name, value in second.items():
        if name not in merged or merged[name] == value:
            merged[name] = value
        elif (
            name == "properties"
            and isinstance(value, Mapping)
            and isinstance(merged[name], Mapping)
        ):
            merged[name] = {**merged[name]}
            for key, schema in value.items():
                own = merged[name].get(key, schema)
                same = own == schema or schema in ({}, True)
                merged[name][key] = own if same else {"allOf": [own, schema]}
        elif name == "required" and isinstance(value, list) and isinstance(merged[name], list):
            merged[name] = list(dict.fromkeys([*names_in(merged, name), *names_in(second, name)]))
        else:
            return None
    closing = [each.get("additionalProperties") is False for each in (first, second)]
    if any(closing):
        # a closed part admits only its own properties
        narrow = set.intersection(*(
            set(names_in(each, "properties")) for each, is_closed in zip((first, second), closing, strict=True)
            if is_closed
        ))  # fmt: skip
        if set(names_in(merged, "properties")) - narrow or merged.get("patternProperties"):
            return None
    return merged


def _narrows(schema: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether what a schema says of the properties that it does not list holds for some that another one lists."""
    more = schema.get("additionalProperties")
    if not isinstance(more, Mapping) or not more:
        return False
    unlisted = {*names_in(other, "properties")} - {*names_in(schema, "properties")}
    return bool(unlisted or other.get("patternProperties"))


def exclusive(options: list[Any]) -> list[Any]:
    """Alternatives of which exactly one holds: those that only require properties exclude those of the others.

    Args:
        options: The alternatives.
    """
    names = [
        set(names_in(each, "required"))
        for each in options
        if isinstance(each, Mapping) and set(each) & ASSERTIONS == {"required"}
    ]  # fmt: skip
    if len(names) != len(options):
        return options
    every = set().union(*names)
    exclusive: list[Any] = []
    for option, own in zip(options, names, strict=True):
        if any(other <= own for other in names if other is not own):
            return options
        excluded = dict.fromkeys(sorted(every - own), False)
        exclusive.append({**option, "properties": excluded} if excluded else option)
    return exclusive


def disjoint(pattern: str, others: Mapping[str, Any]) -> bool:
    """Whether no name fits two patterns, as far as their first characters tell.

    Args:
        pattern: A pattern.
        others: Others, as keys.
    """
    begins = [re.match(r"\^[\w-]+", each) for each in (pattern, *others)]
    texts = [match[0] for match in begins if match]
    if len(texts) != len(begins):
        return False
    first, rest = texts[0], texts[1:]
    return not any(first.startswith(each) or each.startswith(first) for each in rest)
