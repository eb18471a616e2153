"""Grammars of the calls of a layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.keyword_grammar import definitions, keyword_rules, python_keywords
from max.serve.chat.tools.layout import IDENTIFIER, KEY, NAME, NUMBER, CallLayout, Style
from max.serve.chat.tools.values import resolve_schema, types_of

_FIELDS = {IDENTIFIER: "/[a-zA-Z0-9]{9}/", NUMBER: "/[0-9]{1,4}/"}
_BARE_DEPTH = 6


class LayoutRules:
    """Writes the rules of calls, in llguidance's variant of Lark's syntax.

    Args:
        layout: The layout.
        special: The special tokens by their texts.
        space: The pattern of white space in JSON, for llguidance.
    """

    def __init__(self, layout: CallLayout, special: dict[str, int], space: dict[str, Any]) -> None:
        self._layout, self._special, self._space = layout, special, space
        # the longest first, as one special token may begin with another
        marks = sorted(special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self.rules: list[str] = []
        """The rules so far."""

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
        self.rules.append(
            f"call_{index}: {head} {self._arguments(index, tool)} {self.literal(self._layout.tail)}"
        )
        return f"call_{index}"

    def _arguments(self, index: int, tool: Tool) -> str:
        match self._layout.style:
            case Style.JSON:
                return self.json(tool.parameters)
            case Style.TAGGED:
                return self._tagged_parameters(index, tool.parameters)
            case Style.PYTHON:
                return f'{python_keywords(tool.parameters, self._space)} ")"'
            case Style.BARE:
                return f'{keyword_rules(tool.parameters, "", ":", self._bare_value, ",")} "}}"'

    def json(self, schema: Mapping[str, Any]) -> str:
        """The JSON texts of a schema."""
        return f"%json {json.dumps({**schema, 'x-guidance': self._space})}"

    def _json_value(self, schema: dict[str, Any], root: Mapping[str, Any]) -> str:
        return self.json({**definitions(root), **schema})

    def _tagged_parameters(self, index: int, parameters: dict[str, Any]) -> str:
        layout, parts = self._layout, list[str]()
        required = parameters.get("required") or ()
        properties: dict[str, Any] = parameters.get("properties") or {}
        separator = self.literal(layout.value_separator)
        for place, (name, schema) in enumerate(properties.items()):
            value, text = self._tagged_value(f"{index}_{place}", name, schema, parameters)
            key_end = layout.key_end if text else layout.other_key_end
            part = f"{self.literal(layout.key + name + key_end)} {value} {separator}"
            parts.append(part if name in required else f"({part})?")
        more = parameters.get("additionalProperties")
        # a mark that repeats the key cannot end a value whose key is any name
        if (more or isinstance(more, dict)) and KEY not in layout.value_end:
            key = r"/[^<>\"'=\s]{1,64}/"
            value = self._text_value(f"{index}_more", layout.value_end)
            parts.append(
                f"({self.literal(layout.key)} {key} {self.literal(layout.key_end)} {value} {separator})*"
            )
        return " ".join(parts)

    def _tagged_value(
        self, place: str, name: str, schema: Any, root: Mapping[str, Any]
    ) -> tuple[str, bool]:
        """A value with the mark that ends it, and whether it is a text."""
        end = self._layout.value_end.replace(KEY, name)
        types = types_of(schema, root)
        found = resolve_schema(schema, root)
        choices = found.get("enum", [found["const"]] if "const" in found else None)
        if choices and all(isinstance(each, str) and each for each in choices):
            options = " | ".join(self.literal(each) for each in choices)
            return f"({options}) {self.literal(end)}", True
        if not types or "string" in types:
            return self._text_value(place, end), True
        return f"{self._json_value(schema, root)} {self.literal(end)}", False

    def _text_value(self, place: str, end: str) -> str:
        """Any text up to a mark."""
        match = self._split.search(end)
        # no text holds a special token, so the text before one needs no lazy rule
        if match is not None and not end[: match.start()].strip():
            rest = self.literal(end[match.start() :])
            return f"TEXT {rest}"
        mark = end[: match.start()] if match else end
        self.rules.append(f"text_{place}[lazy]: TEXT {json.dumps(mark)}")
        return f"text_{place} {self.literal(end[len(mark) :])}"

    def _bare_value(self, schema: dict[str, Any], root: Mapping[str, Any], depth: int = 0) -> str:
        """A value in an object whose keys have no quotes."""
        mark = self.literal(self._layout.value_end)
        found = resolve_schema(schema, root)
        choices = found.get("enum", [found["const"]] if "const" in found else None)
        if choices:
            return f"({' | '.join(self._bare_literal(each) for each in choices)})"
        types = types_of(schema, root)
        options: list[str] = []
        if "string" in types or not types:
            options.append(f"{mark} {self._bare_text()} {mark}")
        options += [
            self.json({"type": kind}) for kind in ("integer", "number", "boolean", "null") if kind in types
        ]  # fmt: skip
        if "object" in types and depth < _BARE_DEPTH:
            inner = keyword_rules(
                found, "", ":", lambda s, r: self._bare_value(s, root, depth + 1), ","
            )
            options.append(f'"{{" {inner} "}}"')
        if "array" in types and depth < _BARE_DEPTH:
            items = found.get("items")
            item = self._bare_value(
                items if isinstance(items, dict) else {"type": "string"}, root, depth + 1
            )
            options.append(f'"[" ({item} ("," {item})*)? "]"')
        return f"({' | '.join(options)})" if options else f"{mark} {self._bare_text()} {mark}"

    def _bare_text(self) -> str:
        if self._layout.value_end in self._special:
            return "TEXT"
        # there is no look-ahead: a text ends at the first character of the mark
        return f"/[^{re.escape(self._layout.value_end[0])}]*/"

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
    """
    writer = LayoutRules(layout, special, space)
    several = several and layout.several
    trigger = writer.trigger
    whole = (layout.section or layout.head).lstrip()
    rest = whole[len(trigger) :]
    rules = [r"TEXT: /(.|\n)*/"]
    if layout.opening and not free:
        # each call is a message of its own, whose head has the name too
        calls = [
            writer.call(number, tool, layout.opening + whole) for number, tool in enumerate(tools)
        ]
        more = f"({writer.literal(layout.turn)} call)*" if several else ""
        return f"call {more}", [*rules, *writer.rules, f"call: {' | '.join(calls)}"]
    if layout.section:
        calls = [writer.call(number, tool, layout.head) for number, tool in enumerate(tools)]
        more = f"({writer.literal(layout.separator)} call)*" if several else ""
        after = f"{writer.literal(rest)} call {more} {writer.literal(layout.section_end)}"
    else:
        calls = [writer.call(number, tool, rest) for number, tool in enumerate(tools)]
        after = "call"
    rules += [*writer.rules, f"call: {' | '.join(calls)}"]
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
