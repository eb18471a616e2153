"""Grammars of the calls of a layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from max.pipelines.structured.schemas.merging import listed_values
from max.serve.chat.tools.arguments.alternatives import alternatives, as_schema
from max.serve.chat.tools.arguments.number_texts import LIMITS
from max.serve.chat.tools.arguments.object_forms import object_alternatives, with_all_properties
from max.serve.chat.tools.arguments.object_rules import CountedArguments, other_arguments
from max.serve.chat.tools.arguments.raw_texts import (
    expression,
    has_texts,
    text_terms,
    value_forms,
    without,
)
from max.serve.chat.tools.arguments.rule_list import RuleList, repetition
from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.layouts.keyword_grammar import definitions, keyword_rules, python_keywords
from max.serve.chat.tools.layouts.layout import IDENTIFIER, KEY, NAME, NUMBER, CallLayout, Style
from max.serve.chat.tools.values import resolve_schema, types_of

_FIELDS = {IDENTIFIER: "/[a-zA-Z0-9]{9}/", NUMBER: "/[0-9]{1,4}/"}
_BARE_DEPTH = 6
_NAMES = r"[^<>\"'=\s]{1,64}"


class LayoutRules:
    """Writes the rules of calls, in llguidance's variant of Lark's syntax.

    Args:
        layout: The layout.
        special: The special tokens by their texts.
        space: The pattern of white space in JSON, for llguidance.
        rule_list: Receives the rules.
    """

    def __init__(
        self,
        layout: CallLayout,
        special: dict[str, int],
        space: dict[str, Any],
        rule_list: RuleList | None = None,
    ) -> None:
        self._layout, self._special, self._space = layout, special, space
        # the longest first, as one special token may begin with another
        marks = sorted(special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self.rule_list = RuleList() if rule_list is None else rule_list
        """The rules so far, and what they do not hold."""
        self._value_rules: dict[str, str] = {}

    @property
    def trigger(self) -> str:
        """The mark that begins calls: a special token, or the first characters up to white space."""
        trigger = self._layout.trigger
        match = self._split.match(trigger)
        return match[0] if match else trigger

    def literal(self, text: str) -> str:
        """A text with its special tokens and fields, as a part of a rule."""
        parts: list[str] = []
        at = 0
        for match in self._split.finditer(text):
            parts += [*self._plain(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        parts += self._plain(text[at:])
        return " ".join(parts)

    def _plain(self, text: str) -> list[str]:
        pieces = re.split(f"([{IDENTIFIER}{NUMBER}])", text)
        return [_FIELDS.get(piece) or json.dumps(piece) for piece in pieces if piece]

    def call(self, index: int, tool: Tool, head: str) -> str:
        """The name of a rule for the call of a tool, from a part of its head on.

        Args:
            index: The number of the tool.
            tool: The tool.
            head: What is left of the head.
        """
        head = self.literal(filled_name(head, tool.name))
        self.rule_list.rules.append(
            f"call_{index}: {head} {self.arguments(index, tool)} {self.literal(self._layout.tail)}"
        )
        return f"call_{index}"

    def arguments(self, index: int, tool: Tool) -> str:
        """The rule of the arguments of a tool.

        Args:
            index: The number of the tool.
            tool: The tool.
        """
        if self._layout.style is Style.JSON:
            return self.json(tool.parameters)
        self.rule_list.tool = tool.name
        options, lacks = object_alternatives(tool.parameters)
        self.rule_list.note(lacks)
        bodies = [
            self._listed_arguments(f"{index}_{number}", {**definitions(tool.parameters), **option})
            for number, option in enumerate(options)
        ]
        return f"({' | '.join(bodies)})" if len(bodies) > 1 else bodies[0]

    def _listed_arguments(self, place: str, parameters: dict[str, Any]) -> str:
        """The arguments of an object without combinations."""
        match self._layout.style:
            case Style.PYTHON:
                return f'{python_keywords(parameters, self._space, self.rule_list)} ")"'
            case Style.BARE:
                return (
                    f'{keyword_rules(parameters, ":", self._bare_value, self.rule_list, ",")} "}}"'
                )
            case _:
                return self._tagged_parameters(place, parameters)

    def json(self, schema: Mapping[str, Any]) -> str:
        """The JSON texts of a schema."""
        return f"%json {json.dumps({**schema, 'x-guidance': self._space})}"

    def _json_value(self, schema: dict[str, Any], root: Mapping[str, Any]) -> str:
        # only where it refers to them, as each copy makes the grammar longer
        more = definitions(root) if '"$ref"' in json.dumps(schema) else {}
        return self.json({**more, **schema})

    def _tagged_parameters(self, place: str, parameters: dict[str, Any]) -> str:
        layout = self._layout
        required = parameters.get("required") or ()
        properties: dict[str, Any] = parameters.get("properties") or {}
        separator = self.literal(layout.value_separator)
        # a mark that repeats the key cannot end a value whose key is any name
        found, lacks = ([], []) if KEY in layout.value_end else other_arguments(parameters, _NAMES)
        self.rule_list.note(lacks)
        parts: list[tuple[str, bool]] = []
        for number, (name, schema) in enumerate(properties.items()):
            if schema is False:
                continue
            forms = self._tagged_value(f"{place}_{number}", name, schema, parameters)
            # the lexer takes the longest text: a mark with a name would hide other names that begin like it
            each = [
                f"{self.literal(layout.key)} {json.dumps(name)} {self.literal(key_end)} {value}"
                if found
                else f"{self.literal(layout.key + name + key_end)} {value}"
                for key_end, value in forms
            ]
            parts.append((f"({' | '.join(each)}) {separator}", name in required))
        others: list[str] = []
        for number, other in enumerate(found, len(properties)):
            forms = self._tagged_value(f"{place}_{number}", "", other.schema, parameters)
            key = (
                other.names
                if other.names == expression(_NAMES)
                else self.rule_list.add_terminal(other.names)
            )
            others += [
                f"{self.literal(layout.key)} {key} {self.literal(key_end)} {value}"
                for key_end, value in forms
            ]
        rest = f"({' | '.join(others)}) {separator}" if others else None
        counted = CountedArguments(
            [(lambda _, text=text: text, must) for text, must in parts],
            None if rest is None else lambda _: rest,
            parameters.get("minProperties", 0),
            parameters.get("maxProperties"),
            self.rule_list.add,
        )
        self.rule_list.note(counted.lacks())
        if counted.is_needed():
            rule = counted.rule()
            if rule is not None:
                return rule
            self.rule_list.note(
                [key for key in ("minProperties", "maxProperties") if key in parameters]
            )
        written = [text if must else f"({text})?" for text, must in parts]
        return " ".join([*written, *([] if rest is None else [f"({rest})*"])])

    def _tagged_value(
        self, place: str, name: str, schema: Any, root: Mapping[str, Any]
    ) -> list[tuple[str, str]]:
        """What may stand before a value, and the value with the mark that ends it."""
        layout = self._layout
        end = layout.value_end.replace(KEY, name)
        types = types_of(schema, root)
        found = resolve_schema(schema, root)
        choices = listed_values(found)
        # texts only: each is written as it is, and needs no terminal
        if choices and all(isinstance(each, str) and each for each in choices):
            options = " | ".join(self.literal(each) for each in choices)
            return [(layout.key_end, f"({options}) {self.literal(end)}")]
        if types and "string" not in types:
            return [(layout.other_key_end, f"{self._json_value(schema, root)} {self.literal(end)}")]
        tells_texts = layout.key_end != layout.other_key_end
        forms = value_forms(schema, root, self._text_mark(end), tells_texts)
        self.rule_list.note(forms.lacks, name or "*")
        rules: list[tuple[str, str]] = []
        if forms.terminal != "":
            rules.append((layout.key_end, self._text_value(place, end, forms.terminal)))
        if forms.others:
            value = self._json_value(as_schema(forms.others), root)
            rules.append((layout.other_key_end, f"{value} {self.literal(end)}"))
        return rules

    def _text_mark(self, end: str) -> str:
        """What of the mark that ends a text may not stand in it."""
        match = self._split.search(end)
        if match is not None and not end[: match.start()].strip():
            return match[0]
        return (end[: match.start()] if match else end).strip()

    def _text_value(self, place: str, end: str, terminal: str | None) -> str:
        """A text of a terminal, or any, up to a mark."""
        text = "TEXT" if terminal is None else f"HELD_{place}"
        match = self._split.search(end)
        # no text holds a special token, so the text before one needs no lazy rule
        if match is not None and not end[: match.start()].strip():
            if terminal is not None:
                # one terminal with the space before the mark, which a text may end with too
                self.rule_list.rules.append(
                    f"{text}: ({terminal}) {json.dumps(end[: match.start()])}"
                )
            return f"{text} {self.literal(end[match.start() :])}"
        if terminal is not None:
            self.rule_list.rules.append(f"{text}: {terminal}")
        mark = end[: match.start()] if match else end
        # lazy: the text ends at the first mark
        self.rule_list.rules.append(f"text_{place}[lazy]: {text} {json.dumps(mark)}")
        return f"text_{place} {self.literal(end[len(mark) :])}"

    def _bare_value(self, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        """The name of the rule of a value in an object whose keys have no quotes."""
        # one rule for all values of a schema, which may also stand within itself
        key = f"{self.rule_list.tool} {json.dumps(schema)}"
        name = self._value_rules.get(key)
        if name is None:
            name = self._value_rules[key] = f"value_{len(self._value_rules)}"
            self.rule_list.rules.append(f"{name}: {self._bare_body(schema, root, depth)}")
        return name

    def _bare_body(self, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        options = alternatives(schema, root)
        if options is None:
            self.rule_list.note(["all but the types of its arguments"])
            options = [{"type": sorted(types_of(schema, root)) or "string"}]
        rules = [rule for each in options for rule in self._bare_rules(each, root, depth)]
        if not rules:
            self.rule_list.note(["values that are nested too deeply"])
        return f"({' | '.join(dict.fromkeys(rules))})" if rules else '"null"'

    def _bare_rules(self, option: dict[str, Any], root: Mapping[str, Any], depth: int) -> list[str]:
        """The values of a schema without combinations."""
        if "enum" in option:
            return [self._bare_literal(each) for each in option["enum"]]
        kinds = option.get("type", "string")
        rules: list[str] = []
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind == "string":
                rules.append(self._bare_text(option))
            elif kind == "object" and depth < _BARE_DEPTH:
                listed = with_all_properties(option, root)
                if listed is None:
                    continue
                inner = keyword_rules(
                    {**listed, **definitions(root)},
                    ":",
                    lambda s, r: self._bare_value(s, r, depth + 1),
                    self.rule_list,
                    ",",
                )
                rules.append(f'"{{" {inner} "}}"')
            elif kind == "array" and depth < _BARE_DEPTH:
                bare = self._bare_list(option, root, depth)
                rules += [] if bare is None else [bare]
            elif kind not in ("object", "array"):
                own = {key: option[key] for key in option if key in LIMITS}
                rules.append(self.json({**own, "type": kind}))
        return rules

    def _bare_list(self, option: dict[str, Any], root: Mapping[str, Any], depth: int) -> str | None:
        """A list; None if there is none."""
        first: list[Any] = option.get("prefixItems") or []
        items = option.get("items", True)
        least, most = option.get("minItems", 0), option.get("maxItems")
        closed = [at for at, each in enumerate((*first, items)) if each is False]
        if closed:
            most = closed[0] if most is None else min(most, closed[0])
        if most is not None and most < least:
            return None

        def item(schema: Any) -> str:
            # anything may be an item: a text stands for it
            each = {"type": "string"} if schema is True or schema == {} else schema
            return self._bare_value(each, root, depth + 1)

        # from the last one to the first: what follows an item
        listed = first if most is None else first[:most]
        after = ""
        if most is None or most > len(first):
            if not first:
                more = repetition(
                    f'"," {item(items)}', max(least - 1, 0), None if most is None else most - 1
                )
                rule = f'"[" {item(items)} {more} "]"'
                return rule if least else f'("[]" | {rule})'
            room = None if most is None else most - len(first)
            after = repetition(f'"," {item(items)}', max(least - len(first), 0), room)
        for at in reversed(range(len(listed))):
            # from here on inwards: an item is optional together with all that follow it
            each = f"{'' if at == 0 else json.dumps(',')} {item(listed[at])} {after}"
            after = each if at < least else f"({each})?"
        return f'"[" {after} "]"'

    def _bare_text(self, option: dict[str, Any]) -> str:
        """A text between two marks."""
        end = self._layout.value_end
        mark = self.literal(end)
        terms, lacks = text_terms(option)
        self.rule_list.note(lacks)
        special = end in self._special
        if not terms:
            # there is no look-ahead: a text ends at the first character of the mark
            return f"{mark} {'TEXT' if special else f'/[^{re.escape(end[0])}]*/'} {mark}"
        terms.append(without(end if special else end[0]))
        terminal = " & ".join(terms)
        if not has_texts(terminal):
            self.rule_list.note(["what its texts are"])
            return self._bare_text({})
        name = f"HELD_{len(self.rule_list.rules)}"
        self.rule_list.rules.append(f"{name}: {terminal}")
        return f"{mark} {name} {mark}"

    def _bare_literal(self, value: Any) -> str:
        mark = self._layout.value_end
        text = f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value)
        return self.literal(text)


def filled_name(mark: str, name: str) -> str:
    """A mark with the name of the tool."""
    return mark.replace(NAME, name)


def free_text(
    several: bool, special: Mapping[str, int], marks: Sequence[str]
) -> tuple[str, list[str]]:
    """The start of an answer that is free text with calls, and the rules of its text.

    Args:
        several: Whether it may have several calls.
        special: The special tokens by their texts.
        marks: Those that may stand in the text: no pattern holds one.
    """
    tokens = [f"<[{special[mark]}]>" for mark in dict.fromkeys(marks) if mark in special]
    if not tokens:
        return ("calls* text" if several else "calls? text"), ["text: TEXT"]
    marked = f"marked: TEXT ({' | '.join(tokens)})"
    if several:
        return "(marked | calls)* text", [marked, "text: TEXT"]
    return "marked* (calls marked*)? text", [marked, "text: TEXT"]


def layout_rules(
    layout: CallLayout,
    tools: Sequence[Tool],
    special: dict[str, int],
    space: dict[str, Any],
    free: bool,
    several: bool,
    text_marks: Sequence[str] = (),
    rule_list: RuleList | None = None,
) -> tuple[str, list[str]]:
    """The start and the rules of an answer with calls.

    Args:
        layout: The layout.
        tools: The tools that may be called.
        special: The special tokens by their texts.
        space: The pattern of white space in JSON, for llguidance.
        free: Whether the answer is any text until the mark of a call.
        several: Whether it may have several calls.
        text_marks: Special tokens that free text may have, such as those around reasoning.
        rule_list: Receives the rules of the tools, and what these do not hold.
    """
    writer = LayoutRules(layout, special, space, rule_list)
    several = several and layout.several
    trigger = writer.trigger
    whole = (layout.section or layout.head).lstrip()
    # the trigger is written by its token or found in the text, and what follows it by the rules
    rest = whole[len(trigger) :]
    rules = [r"TEXT: /(.|\n)*/"]
    if layout.opening and not free:
        # each call is a message of its own, whose head has the name too
        calls = [
            writer.call(number, tool, layout.opening + whole) for number, tool in enumerate(tools)
        ]
        more = f"({writer.literal(layout.turn)} call)*" if several else ""
        return f"call {more}", [*rules, *writer.rule_list.rules, f"call: {' | '.join(calls)}"]
    if layout.section:
        calls = [writer.call(number, tool, layout.head) for number, tool in enumerate(tools)]
        more = f"({writer.literal(layout.separator)} call)*" if several else ""
        after = f"{writer.literal(rest)} call {more} {writer.literal(layout.section_end)}"
    else:
        calls = [writer.call(number, tool, rest) for number, tool in enumerate(tools)]
        after = "call"
    rules += [*writer.rule_list.rules, f"call: {' | '.join(calls)}"]
    token = special.get(trigger)
    mark = f"<[{token}]>" if token is not None else json.dumps(trigger)
    if free:
        # lazy: the text ends at the first mark
        lazy = "" if token is not None else "[lazy]"
        rules.append(f"trigger{lazy}: TEXT {mark}")
        start, texts = free_text(several, special, text_marks)
        return start, [*rules, f"calls: trigger {after}", *texts]
    rules.append(f"calls: {mark} {after}")
    if layout.section or not several:
        return "calls", rules
    return f"calls ({writer.literal(layout.separator)} calls)*", rules
