"""Keywords of JSON schemas, and schemas of objects that become one."""

from __future__ import annotations

import json
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
_GREATER = frozenset(("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"))
_LESS = frozenset(("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"))
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


def listed_values(schema: Mapping[str, Any]) -> Any:
    """The values that a schema lists by ``enum`` or ``const``; None if it lists none.

    Args:
        schema: The schema, whose ``enum`` need not be a list.
    """
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


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


class NoJoinError(ValueError):
    """Two schemas have no common form."""


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any] | None:
    """As :func:`join_schemas`, but None also where they have no common form.

    Args:
        first: A schema.
        second: Another.
    """
    try:
        return join_schemas(first, second)
    except NoJoinError:
        return None


def join_schemas(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any] | None:
    """What fits both of two schemas as one; None if nothing does.

    Two patterns of texts become a list of both.

    Args:
        first: A schema, without combinations.
        second: Another.

    Raises:
        NoJoinError: They have no common form.
    """
    made = {**first, **second}
    for key in first.keys() & second.keys():
        one, other = first[key], second[key]
        if one == other and value_key(one) == value_key(other):
            continue
        match key:
            case "type":
                kinds = _common_types(_as_list(one), _as_list(other))
                if not kinds:
                    return None
                made[key] = kinds[0] if len(kinds) == 1 else kinds
            case "enum":
                known = set(map(value_key, other))
                made[key] = [each for each in one if value_key(each) in known]
                if not made[key]:
                    return None
            case "pattern":
                made[key] = list(dict.fromkeys([*_as_list(one), *_as_list(other)]))
            case "required" if isinstance(one, list) and isinstance(other, list):
                made[key] = list(dict.fromkeys([*names_in(first, key), *names_in(second, key)]))
            case "additionalProperties":
                made[key] = both_schemas(one, other)
            case "properties" | "patternProperties" if isinstance(one, Mapping) and isinstance(
                other, Mapping
            ):
                pass  # below, with all that is said of them
            case _ if key in _GREATER:
                made[key] = max(one, other)
            case _ if key in _LESS:
                made[key] = min(one, other)
            case _:
                raise NoJoinError
    _join_properties(made, first, second)
    return None if is_contradictory(made) else made


def value_key(value: Any) -> str:
    """A text that equal JSON values share.

    Args:
        value: The value.
    """
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    """A value with integers for whole floats, which are equal in JSON."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_integers(each) for name, each in value.items()}
    return value


def both_schemas(one: Any, other: Any) -> Any:
    """The schema of what fits two schemas.

    Args:
        one: A schema.
        other: Another.
    """
    if one is False or other is False:
        return False
    parts = [each for each in (one, other) if each is not True and each != {}]
    if len(parts) == 2 and parts[0] != parts[1]:
        return {"allOf": parts}
    return parts[0] if parts else {}


def _join_properties(
    schema: dict[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]
) -> None:
    """Joins what two schemas say of the properties of objects."""
    listed, patterns = (
        [each.get(keyword) or {} for each in (first, second)]
        for keyword in ("properties", "patternProperties")
    )
    if not all(isinstance(each, Mapping) for each in (*listed, *patterns)):
        return  # one alone has no form either
    # a schema may say something of the properties that only the other one has
    more = [each.get("additionalProperties") for each in (first, second)]
    more = [True if each is None or each == {} else each for each in more]
    for number, rest in enumerate(more):
        if rest is True:
            continue
        # which of the names fit a pattern is not known here
        named = listed[1 - number].keys() - listed[number].keys()
        if patterns[1 - number].keys() - patterns[number].keys() or (named and patterns[number]):
            raise NoJoinError
    names = {**listed[0], **listed[1]}
    if names:
        schema["properties"] = {
            name: both_schemas(listed[0].get(name, more[0]), listed[1].get(name, more[1]))
            for name in names
        }
    if patterns[0] and patterns[1]:
        schema["patternProperties"] = {
            name: both_schemas(patterns[0].get(name, True), patterns[1].get(name, True))
            for name in {**patterns[0], **patterns[1]}
        }


def is_contradictory(schema: Mapping[str, Any]) -> bool:
    """Whether the limits of a schema of one type exclude each other.

    Args:
        schema: The schema.
    """
    kind = schema.get("type")
    for name, own in (("Length", "string"), ("Items", "array"), ("Properties", "object")):
        most = schema.get(f"max{name}")
        if kind == own and most is not None and schema.get(f"min{name}", 0) > most:
            return True
    if kind not in ("integer", "number"):
        return False
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    return (
        (least is not None and most is not None and least > most)
        or (least is not None and below is not None and least >= below)
        or (above is not None and most is not None and above >= most)
        or (above is not None and below is not None and above >= below)
    )


def _common_types(one: list[str], other: list[str]) -> list[str]:
    pairs = [(first, second) for first in one for second in other]
    # an integer is a number
    common = [
        first if first == second else "integer"
        for first, second in pairs
        if first == second or {first, second} == {"integer", "number"}
    ]
    return list(dict.fromkeys(common))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
