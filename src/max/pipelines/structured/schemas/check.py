"""Finds what does not fit a JSON schema in a value, for keywords that grammars do not hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from max.pipelines.structured.pattern_automata import PatternSearch, TooMuchWorkError
from max.pipelines.structured.schemas.merging import value_key, well_formed
from max.pipelines.structured.schemas.references import References

_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str, "number": (int, float), "boolean": bool, "object": dict, "array": list, "null": type(None),
}  # fmt: skip
APPLIED = {"allOf", "anyOf", "oneOf", "if", "not", "$ref", "dependentSchemas"}
"""Keywords of an object beside which others may say more about its properties."""
_DEPTH = 64
_EXACT = 2**53
_PATTERN = 256
_TEXT = 4096
_MOST_CHECKS = 20_000
"""The maximum number of schemas that are compared with parts of a value, 0.2 s of work: alternatives that refer to
themselves multiply it by their number at each reference."""
_MOST_WORK = 100_000
"""The maximum work of looking for patterns, 0.1 s; see `PatternSearch`."""


def misfit(value: Any, schema: Mapping[str, Any]) -> str | None:
    """The place and the keyword that a value does not fit; None if it fits, as far as is known.

    Formats, and repetitions in patterns that `read_pattern` does not read, are not checked; nor is what takes too long.

    Args:
        value: The value.
        schema: The schema.
    """
    try:
        return _Checker(schema).misfit(value, schema, (), 0)
    except (RecursionError, TooMuchWorkError):
        return None


def fitting(values: Sequence[Any], schema: Mapping[str, Any]) -> list[Any]:
    """The values that fit a schema, as far as is known.

    Args:
        values: The values.
        schema: The schema.
    """
    checker = _Checker(schema, len(values))
    try:
        return [value for value in values if checker.misfit(value, schema, (), 0) is None]
    except (RecursionError, TooMuchWorkError):
        return list(values)


def checker_within(root: Mapping[str, Any]) -> Callable[[Any, Any], bool]:
    """A function that tells whether a value fits a part of a schema, as far as is known; all calls share one bound.

    Args:
        root: The schema that has the definitions of its parts.
    """
    checker = _Checker(root)

    def fits(value: Any, schema: Any) -> bool:
        try:
            return checker.misfit(value, schema, (), 0) is None
        except (RecursionError, TooMuchWorkError):
            return True

    return fits


class _Checker:
    """Checks values.

    Args:
        root: The schema.
        count: The number of values.
    """

    def __init__(self, root: Mapping[str, Any], count: int = 1) -> None:
        self._references = References(root)
        # each value may take a few checks
        self._left = _MOST_CHECKS + 10 * count
        self._patterns = PatternSearch(_MOST_WORK + 100 * count)

    def misfit(self, value: Any, schema: Any, path: tuple[str, ...], depth: int) -> str | None:
        """The place and the keyword that a value does not fit.

        Args:
            value: The value.
            schema: Its schema.
            path: Where the value stands.
            depth: The number of schemas around it.
        """
        self._left -= 1
        if self._left <= 0:
            raise TooMuchWorkError
        if schema is False:
            return _place(path, "false")
        if not isinstance(schema, Mapping) or depth > _DEPTH:
            return None
        schema, _ = well_formed(schema)
        reference = schema.get("$ref", schema.get("$dynamicRef"))
        if isinstance(reference, str):
            target = self._references.target(reference, schema)
            if target is not None and (found := self.misfit(value, target, path, depth + 1)):
                return found
        checks = (self._plain, self._array, self._object, self._check_combinations)
        return next((m for check in checks if (m := check(value, schema, path, depth))), None)

    def _fits(self, value: Any, schema: Any, depth: int) -> bool:
        return self.misfit(value, schema, (), depth + 1) is None

    def _plain(
        self, value: Any, schema: Mapping[str, Any], path: tuple[str, ...], depth: int
    ) -> str | None:
        kinds = schema.get("type")
        if kinds is not None and not any(
            _is(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])
        ):
            return _place(path, "type")
        # its values are compared one by one
        self._left -= len(schema.get("enum", ())) // 4
        if "enum" in schema and value_key(value) not in map(value_key, schema["enum"]):
            return _place(path, "enum")
        if "const" in schema and value_key(value) != value_key(schema["const"]):
            return _place(path, "const")
        if isinstance(value, str):
            if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
                return _place(path, "length")
            if not self._matches(schema.get("pattern"), value):
                return _place(path, "pattern")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            divisor = schema.get("multipleOf")
            # larger floats are not exact
            if isinstance(divisor, int):
                exact = isinstance(value, int) or max(abs(value), divisor) < _EXACT
                if exact and value % divisor:
                    return _place(path, "multipleOf")
            if any(_is_beyond(value, schema, name) for name in _BOUNDS):
                return _place(path, "bounds")
        return None

    def _array(
        self, value: Any, schema: Mapping[str, Any], path: tuple[str, ...], depth: int
    ) -> str | None:
        if not isinstance(value, list):
            return None
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return _place(path, "number of items")
        if schema.get("uniqueItems") is True and len(set(map(value_key, value))) != len(value):
            return _place(path, "uniqueItems")
        if "contains" in schema:
            count = sum(self._fits(item, schema["contains"], depth) for item in value)
            if not schema.get("minContains", 1) <= count <= schema.get("maxContains", count):
                return _place(path, "contains")
        items, prefix = schema.get("items"), schema.get("prefixItems")
        # before draft 2020-12
        if isinstance(items, list):
            prefix, items = items, schema.get("additionalItems")
        first = prefix if isinstance(prefix, list) else []
        for at, item in enumerate(value):
            own = first[at] if at < len(first) else items
            if found := self.misfit(item, own, (*path, str(at)), depth + 1):
                return found
        return None

    def _object(
        self, value: Any, schema: Mapping[str, Any], path: tuple[str, ...], depth: int
    ) -> str | None:
        if not isinstance(value, dict):
            return None
        for name in schema.get("required", ()):
            if name not in value:
                return _place((*path, str(name)), "required")
        if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):  # fmt: skip
            return _place(path, "number of properties")
        properties = schema.get("properties") or {}
        patterns = schema.get("patternProperties") or {}
        more = schema.get("additionalProperties")
        # those keywords may say more about the properties
        if more is None and not schema.keys() & APPLIED:
            more = schema.get("unevaluatedProperties")
        for name, item in value.items():
            place = (*path, name)
            if not self._fits(name, schema.get("propertyNames"), depth):
                return _place(place, "propertyNames")
            own = [properties[name]] if name in properties else []
            own += [each for pattern, each in patterns.items() if self._matches(pattern, name)]
            for each in own or [more]:
                if found := self.misfit(item, each, place, depth + 1):
                    return found
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in (schema.get(keyword) or {}).items():
                if name not in value:
                    continue
                if isinstance(needed, list) and not set(needed) <= value.keys():
                    return _place(path, keyword)
                if not isinstance(needed, list) and not self._fits(value, needed, depth):
                    return _place(path, keyword)
        return None

    def _check_combinations(
        self, value: Any, schema: Mapping[str, Any], path: tuple[str, ...], depth: int
    ) -> str | None:
        for each in schema.get("allOf", ()):
            if found := self.misfit(value, each, path, depth + 1):
                return found
        for keyword in ("anyOf", "oneOf"):
            options = schema.get(keyword)
            if options:
                count = sum(self._fits(value, each, depth) for each in options)
                if not count or (keyword == "oneOf" and count > 1):
                    return _place(path, keyword)
        if "not" in schema and self._fits(value, schema["not"], depth):
            return _place(path, "not")
        if "if" in schema:
            branch = "then" if self._fits(value, schema["if"], depth) else "else"
            return self.misfit(value, schema.get(branch), path, depth + 1)
        return None

    def _matches(self, pattern: Any, text: str) -> bool:
        """Whether a pattern is in a text; long ones and those of other syntax count as found."""
        if not isinstance(pattern, str) or len(pattern) > _PATTERN or len(text) > _TEXT:
            return True
        found = self._patterns.finds(pattern, text)
        if found is None and _tries_one_way(pattern):
            try:
                return re.search(pattern, text) is not None
            except re.error:
                return True
        return found is not False


def _tries_one_way(pattern: str) -> bool:
    """Whether a pattern has neither repetitions nor alternatives, whose ways `re` would try one after another."""
    # without what is escaped, sets, and the begins of groups
    rest = re.sub(r"\\.|\[[^\]]*\]|\(\?<?[:=!]", "", pattern, flags=re.DOTALL)
    return not re.search(r"[*+?{|]", rest)


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _is_beyond(value: float, schema: Mapping[str, Any], name: str) -> bool:
    """Whether a number is beyond a bound; in draft 4 the exclusive ones say of the others that they are."""
    bound = schema.get(name)
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        return False
    exclusive = schema.get(f"exclusive{name[:1].upper()}{name[1:]}") is True
    match name:
        case "minimum":
            return value < bound or (exclusive and value == bound)
        case "maximum":
            return value > bound or (exclusive and value == bound)
        case "exclusiveMinimum":
            return value <= bound
        case _:
            return value >= bound


def _place(path: tuple[str, ...], keyword: str) -> str:
    return f"{'.'.join(path)}: {keyword}" if path else keyword


def _is(value: Any, type_name: Any) -> bool:
    if type_name == "integer":
        whole = isinstance(value, float) and value.is_integer()
        return whole or (isinstance(value, int) and not isinstance(value, bool))
    if not isinstance(type_name, str) or type_name not in _KINDS:
        return True
    return isinstance(value, _KINDS[type_name]) and (
        type_name == "boolean" or not isinstance(value, bool)
    )
