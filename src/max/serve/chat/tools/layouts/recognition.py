"""Finds how a model writes calls, and how its chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from max.serve.chat.channel_marks import channel_marks
from max.serve.chat.reasoning_marks import THINK, derived_marks
from max.serve.chat.tools import harmony
from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.formats import HARMONY, ToolFormat, format_of_template
from max.serve.chat.tools.layouts import probe
from max.serve.chat.tools.layouts.derive import DerivedCalls, call_text, derive, distinct
from max.serve.chat.tools.layouts.layout import IDENTIFIER
from max.serve.chat.tools.layouts.probe import Render, TemplateUse, probe_use
from max.serve.chat.tools.parser import parser_of
from max.serve.requests.parts import AnswerPart, ArgumentsPart, ContentPart, ToolCallPart

_PYTHON_TAG = "<|python_tag|>"
_CHECKED = {
    "city": 'Zürich "N" — <b>\n2nd',
    "days": -3,
    "share": 0.25,
    "deep": {"list": [1, {"a": "b"}, "c"], "flag": True},
    "exact": False,
}
_CHECK_TOOLS = [
    probe.tool(
        name,
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "deep": {"type": "object"},
            "exact": {"type": "boolean"},
        },
    )
    for name in ("get_weather", "set.alarm-2")
]


@dataclass(frozen=True)
class TemplateTools:
    """How a chat template takes tools, and how its model calls them.

    Args:
        use: The form in which the template takes tools and calls.
        format: How the model writes calls.
        reasoning: The marks before and after reasoning; None: it has none.
    """

    use: TemplateUse
    format: ToolFormat
    reasoning: tuple[str, str] | None = None


def tools_of_template(render: Render, template: str, ends: Iterable[str] = ()) -> TemplateTools:
    """How a chat template takes tools, and how its model calls them.

    The format is derived from a conversation with known calls. If the template writes none, or if the calls cannot
    be read back, it is one of the named formats.

    Args:
        render: Formats a conversation; it raises ValueError where the template refuses it.
        template: The template.
        ends: The texts of the tokens that end an answer.
    """
    if not template:
        return TemplateTools(TemplateUse(), format_of_template(template))
    use = probe_use(render)
    # known by its marks: its channels are no layout of calls
    if harmony.CHANNEL in template and "functions." in template:
        return TemplateTools(use, HARMONY)
    reasoning = derived_marks(render)
    if reasoning is None and (channels := channel_marks(render, use)) is not None:
        use, reasoning = replace(use, channels=channels), (channels.begin, channels.end)
    # a template may strip the reasoning of earlier answers, so that a probe shows no marks
    if reasoning is None and THINK[0] in template:
        reasoning = THINK
    if use.renders_calls and (derived := derive(render, use, ends)) is not None:
        found = _format(derived, template)
        # counts only if its parser reads what the template writes
        if found is not None and reads_back(found, render, use):
            return TemplateTools(use, _with_headers(found, use), reasoning)
    return TemplateTools(use, format_of_template(template), reasoning)


def _with_headers(tool_format: ToolFormat, use: TemplateUse) -> ToolFormat:
    """A format whose grammar writes what begins each message with calls."""
    if use.channels is None or not use.channels.call or tool_format.layout is None:
        return tool_format
    layout = replace(tool_format.layout, opening=use.channels.call, turn=use.channels.turn)
    return replace(tool_format, layout=layout)


def _format(derived_calls: DerivedCalls, template: str) -> ToolFormat | None:
    """The format of derived calls; None if text could not be told from them."""
    layout = derived_calls.layout
    found = ToolFormat("template", layout.trigger, layout=layout, syntax="layout")
    if not derived_calls.name_key:
        return found if distinct(layout.trigger) else None
    keys = {"name_key": derived_calls.name_key, "arguments_key": derived_calls.arguments_key}
    found = replace(found, **keys, syntax="json")
    begin = layout.section + layout.head[: layout.head.index("{")]
    # without the list's bracket, which models leave out for one call
    trigger = begin.strip().rstrip("[ \n")
    if not trigger:
        tag = _PYTHON_TAG if _PYTHON_TAG in template else ""
        return replace(found, trigger="", layout=None, separator="; ", optional_trigger=tag)
    if not distinct(trigger):
        return None
    end = layout.section_end or layout.tail[layout.tail.rindex("}") + 1 :]
    after = end.strip().lstrip("] \n")
    return replace(found, trigger=trigger, after=after)


def reads_back(tool_format: ToolFormat, render: Render, use: TemplateUse) -> bool:
    """Whether a format's parser finds the calls that the template writes.

    Args:
        tool_format: The format.
        render: Formats a conversation.
        use: The form in which the template takes calls.
    """
    one, two = ("get_weather", _CHECKED), ("set.alarm-2", {**_CHECKED, "days": 12})
    lists: list[list[tuple[str, dict[str, Any]]]] = [[one], [("get_weather", {"city": "x"})]]
    if tool_format.layout is not None and tool_format.layout.several:
        lists.append([one, two])
    for calls in lists:
        text = call_text(render, use, calls, "", _CHECK_TOOLS)
        if text is None:
            # some templates take no arguments that are objects
            calls = [
                (name, {k: v for k, v in values.items() if k != "deep"}) for name, values in calls
            ]
            text = call_text(render, use, calls, "")
        if text is None:
            return False
        content, found = read(tool_format, [text[0].replace(IDENTIFIER, "a1B2c3D4e")])
        # the answers of some templates begin or end with marks of the turn
        if not same_calls(found, calls) or any(name in content for name, _ in calls):
            return False
    return True


def same_calls(
    found_calls: Sequence[tuple[str, str]], calls: Sequence[tuple[str, dict[str, Any]]]
) -> bool:
    """Whether calls that were found are those that were written.

    Args:
        found_calls: Names and JSON texts.
        calls: Names and values.
    """
    try:
        values = [(name, json.loads(text)) for name, text in found_calls]
    except ValueError:
        return False
    return values == list(calls)


def read(tool_format: ToolFormat, texts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of an answer.

    Args:
        tool_format: The format.
        texts: The parts of the answer.
    """
    tools = [
        Tool(each["function"]["name"], "", each["function"]["parameters"]) for each in _CHECK_TOOLS
    ]
    parser = parser_of(tool_format, tools)
    parts: list[AnswerPart] = [part for text in texts for part in parser.push(text)]
    content, calls = "", list[tuple[str, str]]()
    for part in [*parts, *parser.finish()]:
        match part:
            case ContentPart(text):
                content += text
            case ToolCallPart(_, _, name):
                calls.append((name, ""))
            case ArgumentsPart(_, text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case _:
                pass
    return content, calls
