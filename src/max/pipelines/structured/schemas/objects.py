"""Objects whose ``allOf``, ``anyOf`` and ``oneOf`` are merged into their own properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Any, TypeAlias

from max.pipelines.structured.schemas.merging import (
    ASSERTIONS,
    BRANCHES,
    MERGED,
    exclusive,
    is_condition,
    merge,
    names_in,
    well_formed,
)
from max.pipelines.structured.schemas.opposites import Opposites
from max.pipelines.structured.schemas.references import References

_MAX_DEPTH = 8
_MAX_PARTS = 512
"""The maximum number of schemas that are read for one object that names what is evaluated."""
_LISTED = MERGED | {"allOf", "anyOf", "oneOf", "$ref"}


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
        found = references.resolve(member)
        target, wrong = well_formed(found)
        if wrong or "$ref" in target:
            return schema
        # once for each, as members that refer to members are many paths
        if id(found) not in references.joins:
            references.joins[id(found)] = found, join_all_of(target, references, depth + 1)
        target = references.joins[id(found)][1]
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


def chosen_properties(
    required: Sequence[str], optional: Sequence[str], least: int, most: int | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Which optional properties a closed object has, as alternatives, and the keywords that these do not hold.

    Args:
        required: The properties that it requires.
        optional: The others.
        least: The minimum number of all.
        most: The maximum; None: there is none.
    """
    count = len(optional)
    low = max(least - len(required), 0)
    high = count if most is None else min(most - len(required), count)
    if low > high or (low == 0 and high == count):
        return [], [] if low <= high else ["minProperties" if low else "maxProperties"]

    def choices_of(size: int, needs: bool, bars: bool) -> list[dict[str, Any]]:
        return [
            {
                **({"required": [*required, *some]} if needs else {}),
                **(
                    {"properties": {name: False for name in optional if name not in some}}
                    if bars
                    else {}
                ),
            }
            for some in combinations(optional, size)
        ]

    sizes = range(low, high + 1)
    if low and high < count and sum(comb(count, size) for size in sizes) <= BRANCHES:
        return [each for size in sizes for each in choices_of(size, True, True)], []
    # the others are fewer or more than they may be
    held_low = next(size for size in range(low, -1, -1) if comb(count, size) <= BRANCHES)
    held_high = next(size for size in range(high, count + 1) if comb(count, size) <= BRANCHES)
    if held_low and (held_low == low or held_high == count):
        unheld = ["minProperties"] * (held_low < low) + ["maxProperties"] * (high < count)
        return choices_of(held_low, True, False), unheld
    unheld = ["minProperties"] * (low > 0) + ["maxProperties"] * (held_high > high)
    return choices_of(held_high, False, True) if held_high < count else [], unheld


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


_Listed: TypeAlias = "tuple[dict[str, Any], tuple[Any, ...]]"
"""An object that lists what is evaluated, and schemas that do not hold with it."""


def without_unevaluated(schema: Mapping[str, Any], references: References) -> dict[str, Any] | None:
    """An object without ``unevaluatedProperties``, as objects that list what their members evaluate; None if it has
    no such form.

    Alternatives that hold together evaluate the properties of all; where these are too many, fewer values fit.

    Args:
        schema: The schema.
        references: The schemas that it may refer to.
    """
    conditions = [each for each in schema.get("allOf", ()) if is_condition(each)]
    own = {name: value for name, value in schema.items() if name in _LISTED}
    own["allOf"] = [each for each in schema.get("allOf", ()) if not is_condition(each)]
    objects = _Evaluated(references).objects(own, 0)
    if not objects:
        return None
    rest = {k: v for k, v in schema.items() if k not in own and k != "unevaluatedProperties"}
    made: list[dict[str, Any]] = []
    for each, others in objects:
        # what says something of all other properties evaluates them
        written = {"additionalProperties": schema["unevaluatedProperties"], **each}
        # no object fits it, and others are left
        if len(objects) > 1 and not _has_required(written):
            continue
        unlike = [{"not": other} for other in others]
        made.append({**written, "allOf": unlike} if unlike else written)
    if not made:
        return None
    if len(made) == 1:
        conditions += made[0].pop("allOf", ())
        rest |= made[0]
    else:
        rest |= {"anyOf": made} | ({"type": schema["type"]} if "type" in schema else {})
    return {**rest, "allOf": conditions} if conditions else rest


def _has_required(schema: Mapping[str, Any]) -> bool:
    """Whether an object may have the properties that it requires."""
    if schema["additionalProperties"] is not False or schema.get("patternProperties"):
        return True
    return {*names_in(schema, "required")} <= {*names_in(schema, "properties")}


class _Evaluated:
    """Writes schemas as objects that list what is evaluated.

    Args:
        references: The schemas that they may refer to.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self._opposites = Opposites(references)
        self._parts = 0

    def objects(self, schema: Any, depth: int) -> list[_Listed] | None:
        """Objects of which one or more hold where a schema does; None if it has no such form.

        Args:
            schema: The schema.
            depth: The number of schemas around it.
        """
        self._parts += 1
        if self._parts > _MAX_PARTS or depth > _MAX_DEPTH or not isinstance(schema, Mapping):
            return [({}, ())] if schema is True else None
        schema, wrong = well_formed(schema)
        if wrong or set(schema) & ASSERTIONS - _LISTED:
            return None
        found: list[_Listed] | None = [({k: v for k, v in schema.items() if k in MERGED}, ())]
        members = [*schema.get("allOf", ())]
        if "$ref" in schema:
            members.append(self._references.target(schema["$ref"], schema))
        for member in members:
            found = _products(found, self.objects(member, depth + 1))
        kind = {"type": schema["type"]} if "type" in schema else {}
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                either = self._alternatives(schema[keyword], keyword == "oneOf", kind, depth)
                found = _products(found, either)
        return found

    def _alternatives(
        self, options: Sequence[Any], one: bool, kind: Mapping[str, Any], depth: int
    ) -> list[_Listed] | None:
        """Objects of alternatives: of each one, and of those that may hold together, the fewest first."""
        if len(options) > BRANCHES:
            return None
        listed: list[list[_Listed]] = []
        for option in options:
            found = self.objects(option, depth + 1)
            if found is None:
                return None
            listed.append(found)
        parts = [{**kind, **each} if isinstance(each, Mapping) else each for each in options]
        apart = [[self._opposites.excludes(each, other) for other in parts] for each in parts]
        if one:
            exact: list[_Listed] = []
            for number, every in enumerate(listed):
                # no other one holds
                others = [
                    option for at, option in enumerate(options)
                    if at != number and not apart[number][at]
                ]  # fmt: skip
                exact += [(each, (*unlike, *others)) for each, unlike in every]
            return exact
        made = [(each, (number,)) for number, every in enumerate(listed) for each in every]
        most = max(BRANCHES, len(made))
        for each, chosen in made:  # which grows
            for number in range(chosen[-1] + 1, len(listed)):
                if any(apart[number][at] for at in chosen):
                    continue
                for other in listed[number]:
                    both = _products([each], [other]) or []
                    made += [
                        (joined, (*chosen, number)) for joined in both
                        if len(made) < most and not (_covers(each, joined) or _covers(other, joined))
                    ]  # fmt: skip
        return [each for each, _ in made]


def _covers(one: _Listed, both: _Listed) -> bool:
    """Whether an object evaluates what it evaluates together with another."""
    if "additionalProperties" in one[0]:
        return True
    return all(
        (both[0].get(keyword) or {}).keys() <= (one[0].get(keyword) or {}).keys()
        for keyword in ("properties", "patternProperties")
    )


def _products(first: list[_Listed] | None, second: list[_Listed] | None) -> list[_Listed] | None:
    """Each of some objects together with each of others; None if two are not one, or they are too many."""
    if first is None or second is None or len(first) * len(second) > BRANCHES:
        return None
    made: list[_Listed] = []
    for one, unlike in first:
        for other, more in second:
            merged = merge(one, other)
            if merged is None:
                return None
            made.append((merged, (*unlike, *more)))
    return made
