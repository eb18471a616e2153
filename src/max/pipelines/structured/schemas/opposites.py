"""Opposites of JSON schemas: schemas of the values that do not fit another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor, isfinite
from typing import Any, TypeAlias

from max.pipelines.structured.pattern_automata import (
    MOST_AUTOMATA,
    other_texts,
    unlike_pattern,
)
from max.pipelines.structured.schemas.merging import (
    ASSERTIONS,
    combines,
    listed_values,
    names_in,
    well_formed,
)
from max.pipelines.structured.schemas.references import References

__all__ = ["Opposites"]

Opposite: TypeAlias = "dict[str, Any] | None"
_TYPES = ("string", "number", "boolean", "object", "array", "null")
_MOST = 24
_MOST_INTERVALS = 16
"""The maximum number of intervals between integers."""
_NEAR = 8
"""Numbers that are no integers and further from zero are left out where any value may be."""
_DEPTH = 12
_MOST_STEPS = 4096
"""The maximum number of schemas that are looked at, as references to a schema from within have many paths."""
_NOTHING: dict[str, Any] = {"enum": []}
_BOUNDS = {
    "minLength": "string", "maxLength": "string", "minimum": "number", "maximum": "number",
    "exclusiveMinimum": "number", "exclusiveMaximum": "number", "minItems": "array", "maxItems": "array",
    "minProperties": "object", "maxProperties": "object",
}  # fmt: skip
"""Keywords that limit values of one type."""
_BEYOND = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}  # fmt: skip
_WITH_OTHERS = frozenset(("then", "else", "additionalProperties", "minContains", "maxContains"))
"""Keywords that say something with another one, which has their opposite."""


class Opposites:
    """Writes opposites of schemas.

    A schema is a list of demands, so the values that do not fit it miss one of them.

    Args:
        references: The references of the schemas.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self._automata = self._steps = 0

    def _may_go_on(self, depth: int) -> bool:
        self._steps += 1
        return depth <= _DEPTH and self._steps <= _MOST_STEPS

    def of(self, schema: Any, base: Mapping[str, Any], depth: int = 0) -> Opposite:
        """A schema that fits only values that another does not fit; None where there is none.

        Args:
            schema: The other schema.
            base: What is known of the values: their type, choices and properties.
            depth: The number of schemas around it.
        """
        if isinstance(schema, bool):
            return _NOTHING if schema else {}
        if not isinstance(schema, Mapping) or not self._may_go_on(depth):
            return None
        schema, wrong = well_formed(self._references.resolve(schema))
        if wrong:
            return None
        members: list[Opposite] = []
        listed = schema.get("type")
        kinds = [listed] if isinstance(listed, str) else listed
        for keyword in sorted(set(schema) & ASSERTIONS - _WITH_OTHERS):
            members += self._keyword_opposites(keyword, schema, base, kinds, depth)
        more = schema.get("additionalProperties", {})
        # with properties, `_other_properties` speaks of the others
        if "properties" not in schema and more not in (True, {}):
            members.append({"type": "object", "minProperties": 1} if more is False else None)
        return _any(members)

    def excludes(self, one: Any, other: Any, depth: int = 0, closes: bool = False) -> bool:
        """Whether it is known that no value fits both of two schemas.

        Args:
            one: A schema.
            other: Another.
            depth: The number of schemas around them.
            closes: Whether objects of the other one have the properties that it lists only, unless it says more.
        """
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        if not self._may_go_on(depth):
            return False
        one, other = self._references.resolve(one), self._references.resolve(other)
        if not _kinds(one) & _kinds(other):
            return True
        # all alternatives have to exclude the other schema
        for options, _ in _alternatives(one):
            if all(self.excludes(each, other, depth + 1, closes) for each in options):
                return True
        for options, alone in _alternatives(other):
            if all(self.excludes(one, each, depth + 1, closes and alone) for each in options):
                return True
        first, second = _choices(one), _choices(other)
        if first is not None and second is not None:
            return not any(_is_in(each, second) for each in first)
        if not _kinds(one) == _kinds(other) == {"object"}:
            return False
        # objects that get no other properties than those listed get the required ones too
        sides = [
            {**dict.fromkeys(names_in(each, "required"), True), **_inner(each, "properties")}
            for each in (one, other)
        ]
        for schema, side in ((one, 1), (other, 0)):
            for name in names_in(schema, "required"):
                if name in sides[side]:
                    first, second = (each.get(name) for each in sides)
                    if self.excludes(first, second, depth + 1, closes):
                        return True
                # a property that the objects of the other schema have not
                elif _is_closed((one, other)[side], closes and side == 1):
                    return True
        return False

    def _keyword_opposites(
        self, keyword: str, schema: Mapping[str, Any], base: Mapping[str, Any], kinds: Any, depth: int
    ) -> list[Opposite]:  # fmt: skip
        """The schemas of values that miss the demand of a keyword; one is None if there is none."""
        value = schema[keyword]
        if keyword in _BOUNDS:
            other = _beyond(keyword, value)
            return [other and {"type": _BOUNDS[keyword], **other}]
        match keyword:
            case "type":
                # the opposites of listed values have all other numbers
                return [_other_type(kinds, base, schema.keys().isdisjoint(("enum", "const")))]
            case "enum" | "const":
                values = value if keyword == "enum" else [value]
                return [self._other(values, base, kinds)]
            case "pattern":
                unlike = unlike_pattern(value) if self._may_make_automaton() else None
                return [{"type": "string", "pattern": unlike} if unlike else None]
            case "required":
                names = names_in(schema, "required")
                return [{"type": "object", "properties": {name: False}} for name in names]
            case "properties":
                return self._other_properties(schema, base, depth)
            case "items":
                if not isinstance(value, Mapping):
                    return [None]
                other = self.of(value, _inner(base, "items"), depth + 1)
                if other is not None:
                    other = {"type": "array", "contains": other, **_items(base)}
                return [other]
            case "contains":
                if schema.get("minContains", 1) != 1 or "maxContains" in schema:
                    return [None]
                other = self.of(value, _inner(base, "items"), depth + 1)
                return [None if other is None else {"type": "array", "items": other}]
            case "not":
                return [dict(value) if isinstance(value, Mapping) else None]
            case "anyOf":
                each = [self.of(part, base, depth + 1) for part in value]
                return [None if None in each else {"allOf": each}]
            case "oneOf":
                return [self._none_or_two(value, base, depth)]
            case "allOf":
                return [self.of(part, base, depth + 1) for part in value]
            case "if":
                return self._other_branches(schema, base, depth)
        return [None]

    def _may_make_automaton(self) -> bool:
        self._automata += 1
        return self._automata <= MOST_AUTOMATA

    def _none_or_two(self, choices: Sequence[Any], base: Mapping[str, Any], depth: int) -> Opposite:
        """Values that fit no alternative; those that fit two of many are left out."""
        each = [self.of(part, base, depth + 1) for part in choices]
        if None in each:
            return None
        none = {"allOf": each}
        return {"anyOf": [none, {"allOf": list(choices)}]} if len(choices) == 2 else none

    def _other_branches(
        self, schema: Mapping[str, Any], base: Mapping[str, Any], depth: int
    ) -> list[Opposite]:
        members: list[Opposite] = []
        if schema.get("then") is not None:
            other = self.of(schema["then"], base, depth + 1)
            members.append(None if other is None else {"allOf": [schema["if"], other]})
        if schema.get("else") is not None:
            unlike, other = (self.of(schema[name], base, depth + 1) for name in ("if", "else"))
            members.append(None if unlike is None or other is None else {"allOf": [unlike, other]})
        return members

    def _other(self, exceptions: Sequence[Any], base: Mapping[str, Any], kinds: Any) -> Opposite:
        """All values but a few."""
        if kinds is not None and not isinstance(kinds, list):
            return None
        own = self._references.resolve(base)
        if isinstance(own.get("enum"), list):
            return {"enum": [each for each in own["enum"] if not _is_in(each, exceptions)]}
        # of types that the schema has not, all values are among the opposites of its type
        wanted = [
            each
            for each in _TYPES
            if kinds is None or each in kinds or (each == "number" and "integer" in kinds)
        ]
        wanted = [each for each in wanted if _may_be(each, own)]
        members: list[Opposite] = []
        for kind in wanted:
            values = [each for each in exceptions if _kind_of(each) == kind]
            match kind:
                case "string":
                    unlike = other_texts(values) if values and self._may_make_automaton() else None
                    members.append(
                        {"type": kind, "pattern": unlike}
                        if unlike
                        else None
                        if values
                        else {"type": kind}
                    )
                case "number":
                    members += _other_numbers(sorted(set(values)))
                case "boolean":
                    members += [{"const": each} for each in (True, False) if each not in values]
                case "null":
                    members += [] if values else [{"type": "null"}]
                case _:
                    members.append(None if values else {"type": kind})
        return _any(members) if members else _NOTHING

    def _other_properties(
        self, schema: Mapping[str, Any], base: Mapping[str, Any], depth: int
    ) -> list[Opposite]:
        """Objects with another value of a property, or with one that is not listed."""
        properties, required = _inner(schema, "properties"), names_in(schema, "required")
        own = _inner(base, "properties")
        members: list[Opposite] = []
        for name, each in properties.items():
            if name not in own and base.get("additionalProperties") is False:
                continue  # there is none
            other = self.of(each, _inner(own, name), depth + 1)
            if other == _NOTHING or (other is None and name in required):
                continue  # that the property is missing says enough
            if other is not None:  # that of False is a schema without keywords
                other = {"type": "object", "properties": {name: other}, "required": [name]}
            members.append(other)
        more = schema.get("additionalProperties", True)
        if more is False:
            # objects have no other properties than those that are known
            members += [
                {"type": "object", "required": [name], "properties": {name: own[name]}}
                for name in own
                if name not in properties
            ]
        elif more not in (True, {}):
            members.append(None)
        return members


def _alternatives(schema: Mapping[str, Any]) -> Iterator[tuple[list[Any], bool]]:
    """The alternatives of a schema, and whether it says nothing beside them."""
    kind = {"type": schema["type"]} if "type" in schema else {}
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and options:
            parts = [{**kind, **each} if isinstance(each, Mapping) else each for each in options]
            yield parts, set(schema) & ASSERTIONS <= {"type", keyword}


def _is_closed(schema: Mapping[str, Any], closes: bool) -> bool:
    """Whether objects of a schema have the properties that it lists only."""
    if schema.get("patternProperties") or "propertyNames" in schema:
        return False
    closes = closes and "properties" in schema and not combines(schema)
    return schema.get("additionalProperties", not closes) is False


def _any(members: list[Opposite]) -> Opposite:
    """One of some schemas; None if one is unknown, or they are many."""
    if None in members or len(members) > _MOST:
        return None
    match [each for each in members if each != _NOTHING]:
        case []:
            return _NOTHING
        case [one]:
            return one
        case known:
            return {"anyOf": known}


def _beyond(name: str, value: Any) -> Opposite:
    """The opposite of a bound; no value fits that of a length of zero."""
    if isinstance(value, bool):
        return None
    if name in _BEYOND:
        return {_BEYOND[name]: value}
    if name.startswith("min"):
        return {f"max{name[3:]}": int(value) - 1} if value >= 1 else _NOTHING
    return {f"min{name[3:]}": int(value) + 1}


def _other_type(kinds: Any, base: Mapping[str, Any], with_numbers: bool) -> Opposite:
    if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds):
        return None
    known = base.get("type")
    possible = (
        [known] if isinstance(known, str) else known if isinstance(known, list) else [*_TYPES]
    )
    between: list[Opposite] = []
    if "integer" in kinds and "number" not in kinds and "number" in possible:
        # no type names the numbers that are no integers
        intervals = _between_integers(base)
        if intervals is None and known is not None:
            return None
        if intervals is None:
            intervals = _between_integers({"minimum": -_NEAR, "maximum": _NEAR})
        between += intervals if intervals and with_numbers else []
        possible = [each for each in possible if each != "number"]
    left = [
        each
        for each in possible
        if each not in kinds and not (each == "integer" and "number" in kinds)
    ]
    return _any([*between, *([{"type": left}] if left else [])])


def _between_integers(base: Mapping[str, Any]) -> list[Opposite] | None:
    """The numbers between the integers within known bounds, as intervals; None where these are missing or far."""
    low, high = (
        [
            base[name]
            for name in (bound, f"exclusive{bound.capitalize()}")
            if isinstance(base.get(name), (int, float)) and not isinstance(base[name], bool)
        ]
        for bound in ("minimum", "maximum")
    )
    if not low or not high or not all(map(isfinite, (*low, *high))):
        return None
    first, last = floor(max(low)), ceil(min(high))
    if last - first > _MOST_INTERVALS:
        return None
    return [
        {"type": "number", "exclusiveMinimum": number, "exclusiveMaximum": number + 1}
        for number in range(first, last)
    ]


def _other_numbers(values: Sequence[float]) -> list[Opposite]:
    """All numbers but a few, as intervals."""
    limits = [None, *values, None]
    return [
        {
            "type": "number",
            **({} if low is None else {"exclusiveMinimum": low}),
            **({} if high is None else {"exclusiveMaximum": high}),
        }
        for low, high in zip(limits, limits[1:], strict=False)
    ]


def _may_be(type_name: str, base: Mapping[str, Any]) -> bool:
    """Whether values of which something is known may have a type."""
    known = base.get("type")
    listed = [known] if isinstance(known, str) else known
    return (
        not isinstance(listed, list)
        or type_name in listed
        or (type_name == "number" and "integer" in listed)
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None or isinstance(value, (int, float)):
        return "null" if value is None else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    return any(_kind_of(value) == _kind_of(each) and value == each for each in values)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that values of a schema may have; an integer is a number."""
    listed = schema.get("type")
    kinds = [listed] if isinstance(listed, str) else listed
    if isinstance(kinds, list):
        return {"number" if each == "integer" else str(each) for each in kinds}
    choices = _choices(schema)
    return set(_TYPES) if choices is None else {_kind_of(each) for each in choices}


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    listed = listed_values(schema)
    return listed if isinstance(listed, list) else None


def _inner(base: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = base.get(name)
    return inner if isinstance(inner, Mapping) else {}


def _items(base: Mapping[str, Any]) -> dict[str, Any]:
    return {"items": base["items"]} if "items" in base else {}
