"""What a chat template makes of calls: renders conversations with calls, and notes in which form it takes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from max.serve.chat.tools.channels import Channels

Render = Callable[[list[dict[str, Any]], "list[dict[str, Any]] | None", bool], str]
"""Formats messages and tools; the last argument says whether the text ends where the assistant's turn begins."""

QUESTION, ANSWER, DESCRIBED = "Zquestion", "Zanswer", "Zdescribed"
FIRST, SECOND = "probe_first", "probe_second"
IDS, SHORT_IDS = (
    ("call_Zid000000000000000001", "call_Zid000000000000000002"),
    ("Zid000001", "Zid000002"),
)
KEYS = ("alphakey", "betakey", "gammakey")
TEXT, NUMBER_VALUE, LAST = "Zfirstvalue", 43215, "Zlastvalue"
ARGUMENTS = {KEYS[0]: TEXT, KEYS[1]: NUMBER_VALUE, KEYS[2]: LAST}
WRITTEN = (KEYS[0], TEXT, KEYS[1], str(NUMBER_VALUE), KEYS[2], LAST)
"""The keys and values of the arguments in order."""


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    """A tool of a probe, with OpenAI's fields.

    Args:
        name: Its name.
        properties: The schemas of its arguments.
    """
    described = {
        key: {**schema, "description": "an argument"} for key, schema in properties.items()
    }
    parameters = {"type": "object", "properties": described, "required": list(properties)}
    function = {"name": name, "description": DESCRIBED, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool(name, {KEYS[0]: {"type": "string"}, KEYS[1]: {"type": "integer"}, KEYS[2]: {"type": "string"}})
    for name in (FIRST, SECOND)
]  # fmt: skip


@dataclass(frozen=True)
class TemplateUse:
    """How a chat template takes tools and calls.

    Args:
        renders_calls: Whether it writes the calls of earlier messages.
        describes_tools: Whether it tells the model which tools there are.
        text_arguments: Whether it takes the arguments as JSON text; else as an object.
        null_content: Whether the content of a message with calls is null; else it is empty.
        short_ids: Whether the identifiers of calls have nine letters and digits.
        channels: The marks between the messages of an answer; None: an answer is one message.
    """

    renders_calls: bool = False
    describes_tools: bool = False
    text_arguments: bool = False
    null_content: bool = False
    short_ids: bool = False
    channels: Channels | None = None

    def message(self, calls: Sequence[tuple[str, dict[str, Any]]], content: str) -> dict[str, Any]:
        """A message with calls, in the form that the template takes.

        Args:
            calls: The names and the arguments.
            content: The text before the calls.
        """
        ids = SHORT_IDS if self.short_ids else IDS
        written = [
            {
                "id": identifier,
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments, ensure_ascii=False)
                    if self.text_arguments
                    else arguments,
                },
            }
            for identifier, (name, arguments) in zip(ids, calls, strict=False)
        ]
        text = content or (None if self.null_content else "")
        return {"role": "assistant", "content": text, "tool_calls": written}


def probe_use(render: Render) -> TemplateUse:
    """Finds the form in which a template takes tools and calls.

    Args:
        render: Formats a conversation; it raises ValueError where the template refuses it.
    """
    question = [{"role": "user", "content": QUESTION}]
    described = DESCRIBED in (render_probe(render, question, TOOLS) or "")
    best: tuple[tuple[object, ...], TemplateUse] | None = None
    # from OpenAI's own form to those that fewer templates want; the first of equal cost stays
    for null, text, short in product((False, True), repeat=3):
        use = TemplateUse(True, described, text, null, short)
        message = use.message([(FIRST, ARGUMENTS)], "")
        found = render_probe(render, [*question, message], TOOLS)
        if found is None:
            continue
        _, at, answer = found.rpartition(QUESTION)
        ids = SHORT_IDS if short else IDS
        result = {"role": "tool", "content": ANSWER, "tool_call_id": ids[0], "name": FIRST}
        # the template has written an empty content as Python's None
        if not at or answer.count(TEXT) != 1 or FIRST not in answer or "None" in answer:
            continue
        # templates may check identifiers only where the result comes
        refused = render_probe(render, [*question, message, result], TOOLS) is None
        odd = str(ARGUMENTS) in answer or json.dumps(json.dumps(ARGUMENTS))[1:-1] in answer
        # least is best; `odd`: the arguments stand in it as Python's dict or as a quoted text
        cost = (refused, odd, text, short, len(answer))
        if best is None or cost < best[0]:
            best = (cost, use)
    return best[1] if best else TemplateUse(describes_tools=described)


def render_probe(
    render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begins: bool = False
) -> str | None:  # fmt: skip
    """The text of a conversation; None where the template refuses it.

    Args:
        render: Formats a conversation.
        messages: The messages.
        tools: The tools.
        begins: Whether the text ends where the assistant's turn begins.
    """
    try:
        return render(messages, tools, begins)
    except Exception:  # a tokenizer of the user's own raises any class
        return None
