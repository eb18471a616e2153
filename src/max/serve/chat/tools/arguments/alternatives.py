"""Schemas as alternatives that have no references and combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from max.pipelines.structured.schemas.check import APPLIED, misfit
from max.pipelines.structured.schemas.merging import (
    ASSERTIONS,
    BRANCHES,
    NoJoinError,
    is_contradictory,
    join_schemas,
)
from max.serve.chat.tools.values import resolve_schema

_COMBINATIONS = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_RELATIONS = _COMBINATIONS | {
    "not", "if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "unevaluatedProperties",
}  # fmt: skip
"""Keywords of an object that may say something of one argument by another."""
_DEPTH = 8
# references multiply alternatives, so the number of schemas that are read has a limit
_MOST_SCHEMAS = 500


class _TooManyError(ValueError):
    """A schema is not said by a few alternatives."""


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Schemas of which one fits what a schema fits; None where there would be many.

    They have ``enum`` for ``const``, and ``pattern`` may be a list of patterns that all hold.

    Args:
        schema: The schema.
        root: The schema that has its definitions.
    """
    try:
        options = _Reader(root).options(schema, 0)
    except (_TooManyError, NoJoinError):
        return None
    options = map(_with_choices, options)
    return [each for each in options if each.get("enum") != [] and not is_contradictory(each)]


def as_schema(options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of what fits one of some alternatives.

    Args:
        options: The alternatives.
    """
    schemas: list[dict[str, Any]] = []
    for option in options:
        patterns = option.get("pattern")
        plain = {
            key: option[key] for key in option if key != "pattern" or isinstance(patterns, str)
        }
        if isinstance(patterns, list):
            plain["allOf"] = [{"pattern": each} for each in patterns]
        schemas.append(plain)
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _with_choices(option: dict[str, Any]) -> dict[str, Any]:
    """An alternative whose listed values fit its other keywords."""
    if "enum" not in option:
        return option
    patterns = option.get("pattern", ())
    rest = [{key: option[key] for key in option if key not in ("enum", "pattern")}]
    rest += [{"pattern": each} for each in ([patterns] if isinstance(patterns, str) else patterns)]
    choices = [each for each in option["enum"] if all(misfit(each, own) is None for own in rest)]
    return {**option, "enum": choices}


class _Reader:
    """Reads the alternatives of schemas."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _MOST_SCHEMAS

    def options(self, schema: Any, depth: int) -> list[dict[str, Any]]:
        """The alternatives of a schema.

        Args:
            schema: The schema.
            depth: The number of schemas around it.
        """
        self._left -= 1
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, Mapping) or depth > _DEPTH or self._left < 0:
            raise _TooManyError
        own = {key: schema[key] for key in schema if key in ASSERTIONS and key not in _COMBINATIONS}
        if "const" in own:
            own["enum"] = [own.pop("const")]
        found = [own]
        # each combination is a factor: the product of all is the list of alternatives
        for group in self._groups(schema, depth):
            if len(found) * len(group) > BRANCHES**2:
                raise _TooManyError
            pairs = [join_schemas(one, other) for one in found for other in group]
            made = [each for each in pairs if each is not None]
            found = [each for at, each in enumerate(made) if each not in made[:at]]
            if len(found) > BRANCHES:
                raise _TooManyError
        return found

    def _groups(self, schema: Mapping[str, Any], depth: int) -> Iterator[list[dict[str, Any]]]:
        """For each part that a schema combines with its own keywords: the alternatives."""
        if "$ref" in schema:
            yield self.options(resolve_schema({"$ref": schema["$ref"]}, self._root), depth + 1)
        for member in schema.get("allOf") or ():
            yield self.options(member, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if members := schema.get(keyword):
                yield [option for each in members for option in self.options(each, depth + 1)]


def argument_schema(
    parameters: Any,
    name: str,
    root: Mapping[str, Any] | None = None,
    with_conditions: bool = False,
) -> Any:
    """The schema of an argument, in whichever part of the schema of all arguments it is; None if it has none.

    Args:
        parameters: The schema of the arguments.
        name: The argument.
        root: The schema that has its definitions, if that is another one.
        with_conditions: Whether it has what is said of the argument on conditions, too.
    """
    return _Argument(root or parameters, name, with_conditions).schema(parameters, 0)


def says_of_others(parameters: Mapping[str, Any]) -> bool:
    """Whether what a schema says of an argument may depend on the others.

    Args:
        parameters: The schema of the arguments.
    """
    return not parameters.keys().isdisjoint(_RELATIONS)


class _Argument:
    """Finds what the parts of a schema say of an argument."""

    def __init__(self, root: Mapping[str, Any], name: str, with_conditions: bool) -> None:
        self._root, self._name, self._left = root, name, _MOST_SCHEMAS
        self._with_conditions = with_conditions

    def schema(self, parameters: Any, depth: int) -> Any:
        """What a schema of arguments says of it; None if that is nothing.

        Args:
            parameters: The schema.
            depth: The number of schemas around it.
        """
        self._left -= 1
        if not isinstance(parameters, Mapping) or depth > _DEPTH or self._left < 0:
            return None
        parts = self._own(parameters)
        if isinstance(parameters.get("$ref"), str):
            target = resolve_schema({"$ref": parameters["$ref"]}, self._root)
            parts.append(self.schema(target, depth + 1))
        parts += self._members(parameters, "allOf", depth)
        for keyword in ("anyOf", "oneOf"):
            # alternatives that do not have it are not those of its value
            either = [e for e in self._members(parameters, keyword, depth) if e is not None]
            parts.append({keyword: either} if len(either) > 1 else either[0] if either else None)
        if self._with_conditions:
            parts += [self.schema(each, depth + 1) for each in _conditional(parameters)]
        parts = [each for each in parts if each is not None]
        return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else None

    def _members(self, parameters: Mapping[str, Any], keyword: str, depth: int) -> list[Any]:
        members = parameters.get(keyword)
        return [
            self.schema(each, depth + 1) for each in (members if isinstance(members, list) else ())
        ]

    def _own(self, parameters: Mapping[str, Any]) -> list[Any]:
        """What the keywords of an object say of it."""
        properties, patterns = (
            value if isinstance(value := parameters.get(keyword), Mapping) else {}
            for keyword in ("properties", "patternProperties")
        )
        found = [properties[self._name]] if self._name in properties else []
        found += [
            each
            for pattern, each in patterns.items()
            if misfit(self._name, {"pattern": pattern}) is None
        ]
        # it is about names that neither keyword above has
        more = parameters.get("additionalProperties")
        # other keywords may say more about the properties
        if more is None and (self._with_conditions or parameters.keys().isdisjoint(APPLIED)):
            more = parameters.get("unevaluatedProperties")
        if not found and isinstance(more, Mapping):
            return [more]
        return [each for each in found if each is not False]


def _conditional(parameters: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that hold for an object on conditions."""
    yield from (parameters[keyword] for keyword in ("then", "else") if keyword in parameters)
    for keyword in ("dependentSchemas", "dependencies"):
        members = parameters.get(keyword)
        yield from members.values() if isinstance(members, Mapping) else ()


def listed_properties(parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The properties that any part of a schema lists, which may be of any form.

    Args:
        parameters: The schema.
    """
    found: list[tuple[str, Any]] = []
    left: list[Any] = [parameters]
    seen: set[int] = set()
    while left and len(seen) < _MOST_SCHEMAS:
        schema = left.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            found += [(name, each) for name, each in properties.items() if each is not False]
        if isinstance(schema.get("$ref"), str):
            left.append(resolve_schema({"$ref": schema["$ref"]}, parameters))
        for keyword in ("allOf", "anyOf", "oneOf"):
            members = schema.get(keyword)
            left += members if isinstance(members, list) else []
    return found
