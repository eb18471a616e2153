"""Rewrites JSON schemas to what a grammar can hold, and names what it cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from max._dataclass import dataclass
from max.pipelines.structured.pattern_automata import MOST_AUTOMATA
from max.pipelines.structured.schemas.arrays import (
    lists_of_different,
    with_item,
    with_items_of,
)
from max.pipelines.structured.schemas.check import misfit
from max.pipelines.structured.schemas.conditions import Conditions, listed_around
from max.pipelines.structured.schemas.limits import (
    MAX_MULTIPLES,
    MAX_OPTIONAL_PROPERTIES,
    remainders,
)
from max.pipelines.structured.schemas.merging import (
    ASSERTIONS,
    CONDITIONS,
    COUNTS,
    DROPPED,
    KEPT,
    POINTERS,
    combines,
    condition_base,
    disjoint,
    exclusive,
    is_condition,
    well_formed,
)
from max.pipelines.structured.schemas.names import (
    FORMATS,
    listed_texts,
    name_pattern,
    pattern_for_grammar,
)
from max.pipelines.structured.schemas.objects import (
    chosen_properties,
    join_all_of,
    without_unevaluated,
)
from max.pipelines.structured.schemas.references import References

TYPES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_SAME_FORMATS = {"uuid4": "uuid", "uuid1": "uuid", "uuid5": "uuid", "url": "uri"}
_WITH_ITEMS = frozenset(("contains", "allOf", "anyOf", "oneOf", "if"))
"""Keywords that say of items that they are evaluated."""
_MAX_NODES = 20_000
_MAX_DEPTH = 120


@dataclass(frozen=True)
class GrammarSchema:
    """A schema that a grammar holds.

    Args:
        schema: The schema; its references are to its ``$defs``.
        relaxed_keywords: What it lacks of the given one: places and keywords.
        overlap: The first place of alternatives of ``oneOf`` that exclude each other only with the properties that they
            list; empty: there is none.
    """

    schema: dict[str, Any]
    relaxed_keywords: tuple[str, ...] = ()
    overlap: str = ""


class TooLargeSchemaError(ValueError):
    """A schema has too many parts."""


def grammar_schema(
    schema: Mapping[str, Any],
    conditions: bool = True,
    closed: bool = True,
    apart: bool = False,
) -> GrammarSchema:
    """A schema as a grammar can hold it.

    What annotates is left out, objects that list their properties have no others unless they say so, and keywords
    without counterpart in a grammar are left out and named.

    Args:
        schema: The schema.
        conditions: Whether conditions become alternatives; else they are left out and named.
        closed: Whether objects have no other properties than those that they list.
        apart: Whether each alternative of ``oneOf`` excludes the others, where these have an opposite.

    Raises:
        TooLargeSchemaError: It has too many parts.
    """
    writer = _Writer(schema, conditions, closed, apart)
    root = writer.node(schema, (), 0, True)
    writer.write_definitions()
    definitions = {name: each for name, each in writer.definitions.items() if each is not None}
    written = {**root, "$defs": definitions} if definitions else root
    return GrammarSchema(written, tuple(writer.relaxed_keywords), writer.overlap)


class _Writer:
    """Writes the nodes of a schema."""

    def __init__(
        self, root: Mapping[str, Any], conditions: bool, closes: bool, apart: bool
    ) -> None:
        self._with_conditions, self._closes, self._apart = conditions, closes, apart
        self._references = References(root)
        self._conditions = Conditions(self._references)
        self.relaxed_keywords: list[str] = []
        self.overlap = ""
        self.definitions: dict[str, Any] = {}
        self._names: dict[tuple[int, bool], str] = {}
        self._queue: list[tuple[str, Any, bool]] = []
        self._multiples = self._nodes = self._look_aheads = 0

    def write_definitions(self) -> None:
        """Writes the definitions to which the nodes refer."""
        while self._queue:
            name, target, closed = self._queue.pop()
            self.definitions[name] = self.node(target, ("$defs", name), 0, closed)

    def _note(self, path: tuple[str, ...], what: str) -> None:
        text = f"{'.'.join(path)}: {what}" if path else what
        if text not in self.relaxed_keywords and len(self.relaxed_keywords) < 64:
            self.relaxed_keywords.append(text)

    def _pattern(self, pattern: str) -> str | None:
        """A pattern in the grammar's syntax; None if it has none there."""
        self._look_aheads += "(?" in pattern  # each may make an automaton
        return pattern_for_grammar(pattern) if self._look_aheads <= MOST_AUTOMATA else None

    def node(self, schema: Any, path: tuple[str, ...], depth: int, closed: bool) -> Any:
        """A schema as the grammar can hold it.

        Args:
            schema: The schema.
            path: Where it stands.
            depth: The number of schemas around it.
            closed: Whether an object admits no other properties than those that it lists.
        """
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise TooLargeSchemaError("the schema has too many parts")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self._note(path, "it is no schema")
            return {}
        schema, wrong = well_formed(schema)
        for keyword in wrong:
            self._note(path, keyword)
        if "unevaluatedProperties" in schema:
            schema = self._write_evaluated(schema, path, depth)
        schema = join_all_of(schema, self._references)
        if (
            schema.get("uniqueItems") is True
            and (lists := lists_of_different(schema, self._references)) is not None
        ):
            schema = lists
        reference = schema.get("$ref", schema.get("$dynamicRef", schema.get("$recursiveRef")))
        if isinstance(reference, str):
            target = self._references.target(reference, schema)
            others = {k: v for k, v in schema.items() if k in ASSERTIONS and k not in POINTERS}
            if target is None:
                self._note(path, f"$ref to {reference}")
                return self.node(others, path, depth + 1, closed)
            if "unevaluatedItems" in others:
                found = self._references.resolve(target) if isinstance(target, Mapping) else target
                if (lists := with_items_of(others, found)) is not None:
                    return self.node(lists, path, depth + 1, closed)
                self._note(path, "unevaluatedItems")
                others.pop("unevaluatedItems")
            alone = not others
            written = {"$ref": f"#/$defs/{self._name_of(target, closed and alone, reference)}"}
            if alone:
                return written
            return {"allOf": [written, self.node(others, path, depth + 1, False)]}
        written = {key: schema[key] for key in KEPT if key in schema}
        self._plain(written, schema, path)
        for keyword in DROPPED:
            if keyword in schema and (keyword != "uniqueItems" or schema[keyword]):
                self._write_unsupported(written, schema, keyword, path, closed)
        conditions = self._alternatives(schema, path)
        self._object(written, schema, path, depth, closed)
        self._array(written, schema, path, depth)
        self._write_combinations(written, schema, path, depth, closed)  # last: it reads the others
        if conditions:
            written.setdefault("allOf", []).extend(
                self.node(each, path, depth + 1, False) for each in conditions
            )
        return written

    def _write_evaluated(
        self, schema: Mapping[str, Any], path: tuple[str, ...], depth: int
    ) -> Mapping[str, Any]:
        """An object that says of all properties which are evaluated."""
        rest = {k: v for k, v in schema.items() if k != "unevaluatedProperties"}
        more = schema["unevaluatedProperties"]
        if more in (True, {}) or "additionalProperties" in schema:
            self.node(more, (*path, "unevaluatedProperties"), depth + 1, True)  # whether it is one
            return {"additionalProperties": True, **rest}
        written = without_unevaluated(schema, self._references)
        if written is None:
            self._note(path, "unevaluatedProperties")
        return rest if written is None else written

    def _alternatives(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> list[dict[str, Any]]:  # fmt: skip
        """Conditions of a schema, also those that are members of ``allOf``."""
        found: list[dict[str, Any]] = []
        # members that were joined to the schema have no place left
        members = [((*path, "allOf"), m) for m in schema.get("allOf", ()) if is_condition(m)]
        for place, each in ((path, schema), *members):
            each, left = well_formed(each)
            if not set(CONDITIONS) & each.keys():
                known = []
            elif self._with_conditions:
                known, others = self._conditions.alternatives({**condition_base(schema), **each})
                left += others
            else:
                known = []
                left += [name for name in CONDITIONS if name in each]
            found += known
            for keyword in left:
                self._note(place, keyword)
        return found

    def _name_of(self, target: Any, closed: bool, reference: str) -> str:
        key = (id(target), closed)
        if key not in self._names:
            own = re.sub(r"\W+", "_", reference.rpartition("/")[2]).strip("_") or "root"
            name, number = own, 1
            while name in self.definitions:
                number += 1
                name = f"{own}_{number}"
            self._names[key] = name
            # taken now and written later, as a schema may refer to itself
            self.definitions[name] = None
            self._queue.append((name, target, closed))
        return self._names[key]

    def _plain(self, keywords: dict[str, Any], schema: Mapping[str, Any], path: tuple[str, ...]) -> None:  # fmt: skip
        """Keywords of values that are no objects or lists."""
        kinds = keywords.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds] if kinds is not None else []
        known = [each for each in listed if isinstance(each, str) and each in TYPES]
        if len(known) != len(listed) or (not known and kinds is not None):
            self._note(path, f"type {json.dumps(kinds)[:80]}")
        if kinds is not None:
            keywords.pop("type")
            if known:
                keywords["type"] = known if isinstance(kinds, list) else known[0]
        # in draft 4 these are flags beside the limit
        for limit, other in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(keywords.get(limit), bool):
                if keywords.pop(limit) and other in keywords:
                    keywords[limit] = keywords.pop(other)
        for keyword in COUNTS:
            if keyword in keywords:
                keywords[keyword] = int(keywords[keyword])
        if "required" in keywords:
            keywords["required"] = list(dict.fromkeys(keywords["required"]))
        divisor = schema.get("multipleOf")
        if divisor is not None:
            count = remainders(divisor)
            if count and self._multiples + count <= MAX_MULTIPLES:
                keywords["multipleOf"] = divisor
                self._multiples += count
            else:
                self._note(path, f"multipleOf {divisor}"[:80])
        pattern = schema.get("pattern")
        if pattern is not None:
            text = self._pattern(pattern)
            if text is None:
                self._note(path, f"pattern {json.dumps(pattern)[:80]}")
            else:
                keywords["pattern"] = text
        form = schema.get("format", "")
        form = _SAME_FORMATS.get(form, form)
        if form in FORMATS:
            keywords["format"] = form

    def _write_unsupported(
        self,
        keywords: dict[str, Any],
        schema: Mapping[str, Any],
        keyword: str,
        path: tuple[str, ...],
        closed: bool,
    ) -> None:
        """A keyword without counterpart in a grammar: some are said by others."""
        value = schema[keyword]
        if keyword == "propertyNames":
            listed, patterns = (schema.get(k) for k in ("properties", "patternProperties"))
            if value is True or not (listed or patterns):
                return  # by `_object`, as a pattern
            alone = closed and self._closes and not combines(schema)
            if not patterns and schema.get("additionalProperties", not alone) is False:
                if all(misfit(name, value) is None for name in listed or ()):
                    return  # there are only names that fit
        if keyword == "unevaluatedItems" and not schema.keys() & _WITH_ITEMS:
            return  # by `_array`
        if keyword == "uniqueItems" and keywords.get("maxItems", 2) <= 1:
            return
        if keyword == "contains" and with_item(schema) is not None:
            return  # by `_array`
        self._note(path, keyword)

    def _object(
        self, keywords: dict[str, Any], schema: Mapping[str, Any], path: tuple[str, ...], depth: int, closed: bool
    ) -> None:  # fmt: skip
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = keywords.get("required", [])
        listed = list(properties)
        optional = [name for name in listed if name not in required]
        if len(optional) > MAX_OPTIONAL_PROPERTIES:
            self._note(path, f"the properties after the first {MAX_OPTIONAL_PROPERTIES} optional ones")  # fmt: skip
            left = set(optional[MAX_OPTIONAL_PROPERTIES:])
            listed = [name for name in listed if name not in left]
        more = schema.get("additionalProperties")
        patterns = schema.get("patternProperties")
        patterns = dict(patterns) if isinstance(patterns, Mapping) else {}
        names = schema.get("propertyNames")
        if names is not None and not listed and not patterns:
            patterns, more = self._properties_by_name(keywords, names, more, path, depth)
        if listed or "properties" in keywords:
            keywords["properties"] = {
                **{
                    name: self.node(properties[name], (*path, "properties", name), depth + 1, True)
                    for name in listed
                },
                **keywords.get("properties", {}),
            }
        kept: dict[str, Any] = {}
        for pattern, each in patterns.items():
            text = self._pattern(pattern)
            # a name must not fit two patterns
            if text is None or (kept and not disjoint(text, kept)):
                self._note(path, f"patternProperties {pattern}"[:100])
                more = False if more is None else more  # a name of the pattern gets no other value
                continue
            kept[text] = self.node(each, (*path, "patternProperties", pattern), depth + 1, True)
        if kept:
            keywords["patternProperties"] = kept
        if more is not None:
            place = (*path, "additionalProperties")
            keywords["additionalProperties"] = self.node(more, place, depth + 1, True)
        elif (
            closed
            and self._closes
            and (kept or "properties" in schema)
            and not combines(schema)
            and not schema.keys() & {"enum", "const"}
        ):
            keywords["additionalProperties"] = False
        # a closed object lists what it requires
        if keywords.get("additionalProperties") is False and not kept:
            unlisted = [name for name in required if name not in keywords.get("properties", {})]
            if unlisted and more is False:
                self._note(
                    path, f"additionalProperties, as {json.dumps(unlisted[0])[:80]} is required"
                )
            for name in unlisted:
                keywords.setdefault("properties", {})[name] = {}
        self._property_counts(keywords, path, kept)

    def _property_counts(
        self, keywords: dict[str, Any], path: tuple[str, ...], patterns: Mapping[str, Any]
    ) -> None:
        """Limits of the number of properties: of a closed object, which of the optional ones it has."""
        properties, required = keywords.get("properties", {}), keywords.get("required", [])
        closed = keywords.get("additionalProperties") is False and not patterns
        least, most = keywords.get("minProperties", 0), keywords.get("maxProperties")
        if not properties and not closed and least > max(len(required), 1):
            # a generated name that is not listed may come again, and counts once when it is read
            self._note(path, "minProperties")
        if not properties or (closed and len(properties) == len(required)):
            return
        keywords.pop("minProperties", None)  # counted only where none is listed
        keywords.pop("maxProperties", None)
        optional = [name for name in properties if name not in required]
        if closed:
            either, unheld = chosen_properties(required, optional, least, most)
            if either:
                keywords.setdefault("allOf", []).append({"anyOf": either})
        else:
            unheld = ["minProperties"] * (least > len(required)) + ["maxProperties"] * (
                most is not None
            )
        for keyword in unheld:
            self._note(path, keyword)

    def _properties_by_name(
        self, keywords: dict[str, Any], names: Any, more: Any, path: tuple[str, ...], depth: int
    ) -> tuple[dict[str, Any], Any]:  # fmt: skip
        """Properties whose names have a schema, as patterns or as optional properties."""
        if isinstance(names, bool):
            return {}, more if names else False
        value = {} if more is None or more is True else more
        known, wrong = well_formed(self._references.resolve(names))
        choices = None if wrong else listed_texts(known)
        if choices is not None and len(choices) <= MAX_OPTIONAL_PROPERTIES:
            keywords["properties"] = {
                each: self.node(value, (*path, "additionalProperties"), depth + 1, True)
                for each in choices
            }
            return {}, False
        pattern = None if more is False else name_pattern(names, self._references)
        if pattern:
            return {pattern: value}, False
        if pattern is None and more is not False:
            self._note(path, "propertyNames")
        return {}, more

    def _array(
        self, keywords: dict[str, Any], schema: Mapping[str, Any], path: tuple[str, ...], depth: int
    ) -> None:
        items, prefix = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):
            prefix, items = items, schema.get("additionalItems")
        place = (*path, "items")
        if items is None and not schema.keys() & _WITH_ITEMS:
            items, place = schema.get("unevaluatedItems"), (*path, "unevaluatedItems")
        if isinstance(prefix, list):
            keywords["prefixItems"] = [
                self.node(each, (*path, "prefixItems", str(at)), depth + 1, True)
                for at, each in enumerate(prefix)
            ]
        if (either := with_item(schema)) is not None:
            # members of another type may be beside lists
            kinds = schema.get("type")
            others = [] if kinds == "array" else [{"type": sorted(TYPES - {"array", "integer"})}]
            nodes = [
                self.node(each, (*path, "contains"), depth + 1, True) for each in (*either, *others)
            ]
            keywords.setdefault("allOf", []).append({"anyOf": nodes})
        if items is not None:
            keywords["items"] = self.node(items, place, depth + 1, True)

    def _write_combinations(
        self, keywords: dict[str, Any], schema: Mapping[str, Any], path: tuple[str, ...], depth: int, closed: bool
    ) -> None:  # fmt: skip
        members = schema.get("allOf")
        if isinstance(members, list):
            keywords.setdefault("allOf", []).extend(
                self.node(each, (*path, "allOf", str(at)), depth + 1, False)
                for at, each in enumerate(members)
                if not is_condition(each)
            )
            if not keywords["allOf"]:
                keywords.pop("allOf")
        around = listed_around(keywords) if closed else None
        choices = schema.get("oneOf")
        if isinstance(choices, list):
            choices = exclusive(choices)
            each_alone = (
                self._conditions.apart(choices, schema, around or {}) if self._apart else None
            )
            if each_alone is not None:
                place, closes = (*path, "oneOf"), around is not None
                inner = [self.node(each, place, depth + 1, closes) for each in each_alone]
                keywords.setdefault("allOf", []).append({"anyOf": inner})
                choices = None
        either = schema.get("anyOf")
        for keyword, options in (("anyOf", either), ("oneOf", choices)):
            if not options:
                continue
            alone = not (keywords.keys() - {"type"})
            if closed and around and not alone:
                # one with a wrong keyword is named at its own place
                folded = [
                    each
                    if isinstance(each, Mapping) and well_formed(each)[1]
                    else {**around, "allOf": [each]}
                    for each in options
                ]
                if keyword == "anyOf" or not self._conditions.may_overlap(folded, schema):
                    options, alone = folded, True
            if keyword == "oneOf" and closed and alone and self._closes and not self.overlap:
                # each alternative is closed here, and open where the answer is checked
                self.overlap = (
                    ".".join((*path, keyword))
                    if self._conditions.may_overlap(options, schema)
                    else ""
                )
            inner = [
                self.node(each, (*path, keyword, str(at)), depth + 1, closed and alone)
                for at, each in enumerate(options)
            ]
            if "anyOf" in keywords:
                keywords.setdefault("allOf", []).append({keyword: inner})
            else:
                keywords[keyword] = inner
