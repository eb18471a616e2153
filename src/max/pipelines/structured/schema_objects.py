"""Objects whose ``allOf``, ``anyOf`` and ``oneOf`` are merged into their own properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.pipelines.structured.schema_merging import (
    ASSERTIONS,
    BRANCHES,
    MERGED,
    exclusive,
    is_condition,
    merge,
    well_formed,
)
from max.pipelines.structured.schema_references import References

_MAX_DEPTH = 8


def join_all_of(
    schema: Mapping[str, Any], references: References, depth: int = 0
) -> Mapping[str, Any]:
    """An object whose members of ``allOf`` and simple alternatives are part of it, where that is the same.

    Args:
        schema: The schema.
        references: The schemas that it may refer to.
        depth: The number of members around it.
    """
    members = schema.get("allOf")
    if not isinstance(members, list) or not members or depth > _MAX_DEPTH or "$ref" in schema:
        return _spread_alternatives(schema, references)
    parts: list[Mapping[str, Any]] = []
    conditions = [member for member in members if is_condition(member)]
    for member in members:
        if is_condition(member):
            continue
        if not isinstance(member, Mapping):
            return schema
        target, wrong = well_formed(references.resolve(member))
        if wrong or "$ref" in target:
            return schema
        target = join_all_of(target, references, depth + 1)
        if set(target) & ASSERTIONS - MERGED:
            return schema
        parts.append({name: target[name] for name in MERGED if name in target})
    own = {name: value for name, value in schema.items() if name != "allOf"}
    merged = own
    for part in parts:
        together = merge(merged, part)
        if together is None:
            return schema
        merged = together
    return (
        {**merged, "allOf": conditions} if conditions else _spread_alternatives(merged, references)
    )


def _spread_alternatives(schema: Mapping[str, Any], references: References) -> Mapping[str, Any]:
    """An object with alternatives, as alternatives that are objects with all properties."""
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        other = "oneOf" if keyword == "anyOf" else "anyOf"
        if not isinstance(options, list) or other in schema or "allOf" in schema or "$ref" in schema:  # fmt: skip
            continue
        own = {name: schema[name] for name in schema if name in ASSERTIONS and name != keyword}
        if not own.get("properties") or len(options) > BRANCHES or set(own) - MERGED:
            continue
        if keyword == "oneOf":
            options = exclusive(options)
        spread: list[Any] = []
        for option in options:
            if not isinstance(option, Mapping):
                break
            target, wrong = well_formed(references.resolve(option))
            if wrong or "$ref" in target or set(target) & ASSERTIONS - MERGED:
                break
            together = merge(own, {name: target[name] for name in MERGED if name in target})
            if together is None:
                break
            spread.append(together)
        if len(spread) == len(options):
            rest = {k: v for k, v in schema.items() if k not in own and k != keyword}
            return {**rest, keyword: spread}
    return schema
