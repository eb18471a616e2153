"""Derives the layout of calls from what a chat template writes for known ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from max.serve.chat.tools.layouts import probe
from max.serve.chat.tools.layouts.layout import (
    IDENTIFIER,
    KEY,
    NAME,
    NUMBER,
    CallLayout,
    Style,
    common_end,
    common_start,
    words,
)
from max.serve.chat.tools.layouts.probe import Render, TemplateUse, render_probe
from max.serve.chat.tools.pythonic import CallEnd
from max.serve.chat.tools.values import bare_object_end

_MARK = re.compile(r"[^\w\s.,;:'\"(){}]")

_MOST_AFTER = 160


@dataclass(frozen=True)
class DerivedCalls:
    """Calls as a template writes them.

    Args:
        layout: Where their parts stand.
        name_key: The key of the name, where a call is one JSON object; empty: it is none.
        arguments_key: The key of the arguments there.
    """

    layout: CallLayout
    name_key: str = ""
    arguments_key: str = ""


@dataclass(frozen=True)
class _Unit:
    """One call in a text: the places of its parts."""

    begin: int
    name: tuple[int, int]
    arguments: tuple[int, int]
    end: int
    style: Style
    name_key: str = ""
    arguments_key: str = ""


def derive(render: Render, use: TemplateUse, ends: Iterable[str] = ()) -> DerivedCalls | None:
    """The layout of the calls that a template writes; None where it is not clear.

    Args:
        render: Formats a conversation.
        use: The form in which the template takes calls.
        ends: The texts of the tokens that end an answer.
    """
    one, two = (probe.FIRST, probe.ARGUMENTS), (probe.SECOND, probe.ARGUMENTS)
    first = call_text(render, use, [one], "")
    if first is None:
        return None
    body, tail = first
    units = [_find_unit(body, probe.FIRST, 0)]
    # templates that take one call a message refuse this; one call then has to tell
    both = call_text(render, use, [one, two], "")
    if both is not None and units[0] is not None:
        found = _find_unit(both[0], probe.FIRST, 0)
        other = found and _find_unit(both[0], probe.SECOND, found.end)
        if found and other:
            (body, tail), units = both, [found, other]
    unit = units[0]
    if unit is None:
        return None
    # without arguments: where the mark of the first key begins
    none = call_text(render, use, [(probe.FIRST, {})], "") if unit.style is Style.TAGGED else None
    layout = _layout(body, tail, [each for each in units if each], none and none[0], tuple(ends))
    if layout is None:
        return None
    return DerivedCalls(layout, unit.name_key, unit.arguments_key)


def call_text(
    render: Render,
    use: TemplateUse,
    calls: list[tuple[str, dict[str, Any]]],
    content: str,
    tools: list[dict[str, Any]] | None = None,
) -> tuple[str, str] | None:
    """What a template writes for an answer with calls, and what it writes after answers.

    Args:
        render: Formats a conversation.
        use: The form in which the template takes calls.
        calls: The names and the arguments.
        content: The text before them.
        tools: The tools; None: those of the probe.
    """
    tools = tools or probe.TOOLS
    question: dict[str, Any] = {"role": "user", "content": probe.QUESTION}
    plain = render_probe(render, [question, {"role": "assistant", "content": probe.ANSWER}], tools)
    text = render_probe(render, [question, use.message(calls, content)], tools)
    if text is None or probe.QUESTION not in text:
        return None
    prompt = render_probe(render, [question], tools, True)
    tail = ""
    if plain is not None and probe.ANSWER in plain:
        # what ends each answer, with calls or without
        head, _, tail = plain.rpartition(probe.ANSWER)
        if use.channels is not None and use.channels.answer_end:
            tail = tail.removeprefix(use.channels.answer_end)
        # templates may write something else before an answer with calls
        if not text.startswith(head):
            head = common_start(head, text)
    else:
        head = text[: text.rfind(probe.QUESTION) + len(probe.QUESTION)]
    # the answer begins where the prompt of a generation ends
    longer = prompt is not None and (len(prompt) > len(head) or use.channels is not None)
    if prompt is not None and longer and text.startswith(prompt):
        head = prompt
    body = text[len(head) :]
    # templates may repeat the last message of the user
    if probe.QUESTION in body:
        body = body.rpartition(probe.QUESTION)[2]
    if tail and body.endswith(tail):
        body = body[: len(body) - len(tail)]
    elif tail.strip() and body.rstrip().endswith(tail.strip()):
        body = body.rstrip()[: -len(tail.strip())]
    if use.channels is not None:
        body = use.channels.without_headers(body)
    # the identifier is a field of the mark, as it differs at each call
    for identifier in (*probe.IDS, *probe.SHORT_IDS):
        body = body.replace(identifier, IDENTIFIER)
    return body, tail


def _find_unit(text: str, name: str, start: int) -> _Unit | None:
    """The call of a tool in a text."""
    # each brace may begin the arguments of a call, or a call that is one object
    for match in re.finditer(r"\{", text[start:]):
        begin = start + match.start()
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            continue
        if value == probe.ARGUMENTS:
            at = text.rfind(name, start, begin)
            if at < 0:
                return None
            return _Unit(at, (at, at + len(name)), (begin, end), end, Style.JSON)
        keys = _object_keys(value, name)
        if keys is None:
            continue
        # 1: after the quote
        name_at = text.find(json.dumps(name), text.find(json.dumps(keys[0]), begin)) + 1
        place = _arguments_place(text, begin, end)
        if place is None or name_at <= 0:
            return None
        return _Unit(begin, (name_at, name_at + len(name)), place, end, Style.JSON, *keys)
    # no object: Python's keywords, bare keys or tags, told by what follows the name
    key_at = text.find(probe.KEYS[0], start)
    at = text.rfind(name, start, key_at) if key_at >= 0 else -1
    if at < 0:
        return None
    after = text[at + len(name) :]
    span = (at, at + len(name))
    if re.match(r"\(\s*" + probe.KEYS[0] + r"\s*=", after):
        size = CallEnd().take(text[at:])
        return None if size is None else _Unit(at, span, span, at + size, Style.PYTHON)
    if re.match(r"\s*\{\s*" + probe.KEYS[0] + r"\s*:", after):
        begin = text.index("{", span[1])
        mark = text[key_at + len(probe.KEYS[0]) : text.find(probe.TEXT, key_at)].lstrip(": ")
        size = bare_object_end(text[begin:], mark)
        if size is None or not mark:
            return None
        return _Unit(at, span, (begin, begin + size), begin + size, Style.BARE)
    places: list[int] = []
    place = key_at
    for part in probe.WRITTEN:
        place = text.find(part, place)
        if place < 0:
            return None
        places.append(place)
        place += len(part)
    return _Unit(at, span, (key_at, place), place, Style.TAGGED)


def _object_keys(value: Any, name: str) -> tuple[str, str] | None:
    """The keys of the name and of the arguments in a call that is one object."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        return _object_keys(inner, name)
    names = [key for key, each in value.items() if each == name]
    arguments = [
        key
        for key, each in value.items()
        if each == probe.ARGUMENTS
        or (isinstance(each, str) and _load_json(each) == probe.ARGUMENTS)
    ]
    return (names[0], arguments[0]) if names and arguments else None


def _arguments_place(text: str, begin: int, end: int) -> tuple[int, int] | None:
    for match in re.finditer(r"[{\"]", text[begin + 1 : end]):
        at = begin + 1 + match.start()
        try:
            value, stop = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            continue
        if value == probe.ARGUMENTS or (isinstance(value, str) and _load_json(value) == probe.ARGUMENTS):  # fmt: skip
            return at, stop
    return None


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _layout(
    body: str, tail: str, units: list[_Unit], none: str | None, ends: tuple[str, ...]
) -> CallLayout | None:
    """The layout of the calls in a text.

    Args:
        body: The text.
        tail: What stands after answers.
        units: The places of the calls, one or two.
        none: A text of a call without arguments.
        ends: The texts of the tokens that end an answer.
    """
    unit = units[0]
    before, after = body[: unit.begin], body[units[-1].end :]
    tagged = _Tags() if unit.style is not Style.TAGGED else _tags(body, unit, none)
    if tagged is None:
        return None
    after = _without_tail(after.removeprefix(tagged.last_value_end), tail, ends)
    section, head, end, separator, section_end = "", before, after, "", ""
    # the text between two calls tells the marks of a call from those of the list
    if len(units) == 2:
        between = body[unit.end : units[1].begin].removeprefix(tagged.last_value_end)
        head = common_end(before, between)
        rest = between[: len(between) - len(head)]
        section = before[: len(before) - len(head)]
        if rest.strip() and after.startswith(rest.rstrip()):
            end = rest.rstrip()
        else:
            end = common_start(rest, after)
        separator, section_end = rest[len(end) :], after[len(end) :]
        if not section.strip():
            # the white space before the first call belongs to the turn
            section, section_end = "", ""
    several = len(units) == 2
    for name in (probe.FIRST, probe.SECOND):
        # what names the tool belongs to a call, not to the list around all calls
        section = section.rpartition(name)[2]
        if name in separator:
            several, separator = False, ""
    # each argument has its white space after it, the last one too
    end = end.removeprefix(tagged.separator)
    inner = body[unit.begin : unit.end]
    name_at = unit.name[0] - unit.begin
    name_end = unit.name[1] - unit.begin
    begin, stop = unit.arguments[0] - unit.begin, unit.arguments[1] - unit.begin
    inside = inner[:name_at] + NAME
    match unit.style:
        case Style.PYTHON:
            inside, finish = inside + "(", ""
        case Style.BARE:
            inside, finish = inside + inner[name_end:begin] + "{", ""
        case Style.TAGGED:
            inside, finish = inside + tagged.head, ""
        # arguments before the name: a parser would have to hold them back
        case Style.JSON if begin < name_at:
            return None
        case Style.JSON:
            inside, finish = inside + inner[name_end:begin], inner[stop:]
    head, end = head + inside, finish + end
    if len(units) == 2:
        one, other = (body[each.begin : each.end] for each in units)
        head, end = _with_numbers(head, end, one, other)
    if not section and not head.strip(NAME + " \n"):
        return None
    value_end = tagged.value_end
    if unit.style is Style.BARE:
        key = body.find(probe.KEYS[0], unit.begin) + len(probe.KEYS[0])
        value_end = body[key : body.find(probe.TEXT, key)].lstrip(": ")
    return CallLayout(
        head=head if section else head.lstrip(),
        style=unit.style,
        tail=end.rstrip(),
        section=section.lstrip(),
        section_end=section_end.rstrip(),
        separator=separator,
        several=several,
        key=tagged.key,
        key_end=tagged.key_end,
        other_key_end=tagged.other_key_end,
        value_end=value_end,
        value_separator=tagged.separator,
    )


@dataclass(frozen=True)
class _Tags:
    """The marks of arguments between tags."""

    head: str = ""
    key: str = ""
    key_end: str = ""
    other_key_end: str = ""
    value_end: str = ""
    separator: str = ""
    last_value_end: str = ""
    """What ends the last value of a call."""


def _tags(body: str, unit: _Unit, none: str | None) -> _Tags | None:
    at, gaps = unit.name[1], list[str]()
    # what stands before each key and each value
    for part in probe.WRITTEN:
        place = body.index(part, at)
        gaps.append(body[at:place])
        at = place + len(part)
    before, key_end, between, other_key_end, later, last_key_end = gaps
    # the first and the last value are texts, so what stands before both has to be the same
    if last_key_end != key_end:
        return None
    head = ""
    # a call without arguments tells the head from the mark of the first key
    if none is not None and (name_at := none.rfind(probe.FIRST)) >= 0:
        head = common_start(before, none[name_at + len(probe.FIRST) :])
    key = before[len(head) :]
    if not key.strip() or not between.endswith(key):
        key = common_end(before, between)
        head = before[: len(before) - len(key)]
    if not key.strip():
        return None
    ends = [
        text[: len(text) - len(key)].replace(name, KEY)
        for text, name in ((between, probe.KEYS[0]), (later, probe.KEYS[1]))
    ]
    if ends[0] != ends[1] or not ends[0].strip():
        return None
    value_end = ends[0].rstrip()
    shared = common_end(head, value_end)
    own_end = value_end[: len(value_end) - len(shared)]
    # a mark that is all that ends a value stays with it: a parser would look for nothing
    if shared.strip() and own_end.strip():
        # what stands before each tag belongs to the tag
        head, key, value_end = head[: len(head) - len(shared)], shared + key, own_end
    closed = value_end.replace(KEY, probe.KEYS[2])
    separator = ends[0][len(ends[0].rstrip()) :]
    return _Tags(head, key, key_end, other_key_end, value_end, separator, closed)


def _without_tail(after: str, tail: str, ends: tuple[str, ...]) -> str:
    """What stands after the last call, without what ends every answer."""
    if tail.strip() and after.rstrip().endswith(tail.strip()):
        after = after.rstrip().removesuffix(tail.strip())
    for end in ends:
        # end tokens of the model are never part of a text
        after = after.partition(end)[0] if end else after
    # a template may go on with instructions
    return after if len(after) <= _MOST_AFTER else after.lstrip().split("\n")[0]


def _with_numbers(head: str, end: str, one: str, other: str) -> tuple[str, str]:
    """Marks in which the number of the call is a field."""
    left, right = words(one), words(other)
    if len(left) != len(right):
        return head, end
    changed = [
        (a, b) for a, b in zip(left, right, strict=True) if a != b and a.isdigit() and b.isdigit()
    ]
    if not changed:
        return head, end
    # not as a part of a longer number or name
    number = re.compile(rf"(?<!\w){re.escape(changed[0][0])}(?!\w)")
    return number.sub(NUMBER, head), number.sub(NUMBER, end)


def distinct(trigger: str) -> bool:
    """Whether text is told from calls by the mark that begins calls.

    Args:
        trigger: The mark.
    """
    return len(trigger) > 3 and _MARK.search(trigger) is not None
