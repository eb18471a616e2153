"""Keywords of JSON schemas, and schemas of objects that become one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    # JSON has one kind of number, so 2.0 is a count
    return _is_number(value) and value >= 0 and value == value // 1


def _is_schema(value: Any) -> bool:
    return isinstance(value, (Mapping, bool))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_named(value: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Whether a value is an object of values of some kinds; some clients write an empty one as a list."""
    if not isinstance(value, Mapping):
        return value == []
    return all(any(kind(each) for kind in kinds) for each in value.values())


_SHAPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    # in draft 4 these are flags beside the limit
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), lambda v: isinstance(v, bool) or _is_number(v)
    ),
    **dict.fromkeys((*COUNTS, "minContains", "maxContains"), _is_count),
    "uniqueItems": lambda v: isinstance(v, bool),
    "multipleOf": lambda v: _is_number(v) and v > 0,
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), _is_schema),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _is_schema),
    **dict.fromkeys(
        ("enum", "allOf", "anyOf", "oneOf", "prefixItems"), lambda v: isinstance(v, list)
    ),
    **dict.fromkeys((*POINTERS, "pattern", "format"), lambda v: isinstance(v, str)),
    **dict.fromkeys(("properties", "patternProperties"), lambda v: _is_named(v, lambda _: True)),
    "required": _is_texts,
    "dependentRequired": lambda v: _is_named(v, _is_texts),
    "dependentSchemas": lambda v: _is_named(v, _is_schema),
    "dependencies": lambda v: _is_named(v, _is_texts, _is_schema),
}
"""Of what kind the values of keywords are; those that are not listed are looked at where they are read."""


def well_formed(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """A schema without keywords whose values have the wrong kind, and the names of these; null is no value.

    Args:
        schema: The schema.
    """
    nulls = [k for k, v in schema.items() if v is None and k in ASSERTIONS and k != "const"]
    wrong = [k for k, v in schema.items() if v is not None and k in _SHAPES and not _SHAPES[k](v)]
    if not nulls and not wrong:
        return schema, []
    return {k: v for k, v in schema.items() if k not in nulls and k not in wrong}, wrong


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
