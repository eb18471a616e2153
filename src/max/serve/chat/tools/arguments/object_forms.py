"""Objects as alternatives without combinations, which list all their properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.pipelines.structured.schemas.merging import both_schemas
from max.serve.chat.tools.arguments.alternatives import alternatives, listed_properties
from max.serve.chat.tools.arguments.object_rules import is_open, schemas_of_name

_OBJECT = frozenset((
    "type", "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
))  # fmt: skip


def object_alternatives(parameters: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The arguments of a call as alternatives with all their properties, and the keywords that these lack.

    Args:
        parameters: The schema of the arguments.
    """
    options = alternatives(parameters, parameters)
    if options is None:
        # names at least, as a wrong one is the most common error of a call
        names = {name: {} for name, _ in listed_properties(parameters)}
        return [{"properties": names}], ["all but the names of its arguments"]
    found: list[dict[str, Any]] = []
    lacks: list[str] = []
    for option in options:
        kinds = option.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            continue
        made = with_all_properties(option, parameters)
        if made is None:
            continue
        if made not in found:
            found.append(made)
        lacks += [key for key in option if key not in _OBJECT]
    if not found:
        return [{}], ["all, as nothing fits it"]
    return found, list(dict.fromkeys(lacks))


def with_all_properties(
    option: Mapping[str, Any], root: Mapping[str, Any]
) -> dict[str, Any] | None:
    """An object that lists all properties that it requires; None if one of these fits nothing.

    Args:
        option: The schema of the object, without combinations.
        root: The schema that has its definitions.
    """
    required: list[str] = option.get("required") or []
    properties: dict[str, Any] = {}
    for name in {**(option.get("properties") or {}), **dict.fromkeys(required)}:
        schema: Any = True
        for each in schemas_of_name(option, name):
            schema = both_schemas(schema, each)
        if not _fits_nothing(schema, root):
            properties[name] = schema
        elif name in required:
            return None
        elif is_open(option):
            # no other property has its name
            properties[name] = False
    return {**option, "properties": properties} if properties or "properties" in option else {**option}  # fmt: skip


def _fits_nothing(schema: Any, root: Mapping[str, Any]) -> bool:
    # schemas that contradict each other come from conditions
    return alternatives(schema, root) == []
