"""How models write calls of tools, by family."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from max.serve.chat.tools import deepseek, functionary, harmony, pythonic
from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.layouts.layout import NAME, NUMBER, CallLayout, Style, fill_mark


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: marks around JSON objects.

    Args:
        name: The name of the format.
        trigger: What begins one call or a list of them; empty: calls begin with the answer.
        before: What stands between the trigger and the first object.
        after: What ends what the trigger began.
        separator: What stands between two objects; None: each call has a trigger of its own.
        arguments_key: The key of the arguments.
        optional_trigger: Something that may stand before the first object, where there is no trigger.
        syntax: How a call is written: ``"json"`` for an object, else the name of a parser's syntax.
        marks: More special tokens that are part of the text.
        layout: Where the parts of calls stand, if it was derived from the chat template.
        name_key: The key of the name.
    """

    name: str
    trigger: str
    before: str = ""
    after: str = ""
    separator: str | None = None
    arguments_key: str = "arguments"
    optional_trigger: str = ""
    syntax: str = "json"
    marks: tuple[str, ...] = ()
    layout: CallLayout | None = None
    name_key: str = "name"

    def visible(self, special: Iterable[str]) -> list[str]:
        """The special tokens that are part of the text of calls.

        Args:
            special: The texts of all special tokens.
        """
        own = {self.trigger, self.optional_trigger, *self.marks}
        marks = self.layout.marks if self.layout else ""
        return [token for token in special if token in own or token in marks]

    def render_call(self, name: str, arguments: str) -> str:
        """A call as the model would write it, for templates that leave calls out.

        Args:
            name: The tool.
            arguments: JSON text of an object.
        """
        if self.layout is not None and self.layout.style is Style.PYTHON:
            values = ", ".join(f"{key}={value!r}" for key, value in json.loads(arguments).items())
            layout = self.layout
            return f"{layout.section}{fill_mark(layout.head, name)}{values}){layout.section_end}"
        if self.layout is not None:
            layout = self.layout
            head = f"{layout.section}{fill_mark(layout.head, name)}"
            return f"{head}{arguments}{layout.tail}{layout.section_end}"
        if self.syntax == "pythonic":
            values = ", ".join(f"{key}={value!r}" for key, value in json.loads(arguments).items())
            return f"[{name}({values})]"
        if self.syntax == "deepseek":
            call = f"{deepseek.CALL_BEGIN}{name}{deepseek.SEPARATOR}{arguments}{deepseek.CALL_END}"
            return f"{self.trigger}{call}{self.after}"
        if self.syntax == "functionary":
            return f"{functionary.SEPARATOR}{name}\n{arguments}"
        if self.syntax == "harmony":
            head = f"{harmony.CHANNEL}commentary to=functions.{name} {harmony.CONSTRAIN}json"
            return f"{head}{harmony.MESSAGE}{arguments}{harmony.CALL}"
        call = f'{{"name": {json.dumps(name)}, "{self.arguments_key}": {arguments}}}'
        return f"{self.trigger}{self.before}{call}{self.after}"


HERMES = ToolFormat("hermes", "<tool_call>", "\n", "\n</tool_call>")
GENERIC = ToolFormat("generic", "<tool_call>", "\n", "\n</tool_call>")
LLAMA3 = ToolFormat(
    "llama3_json",
    "",
    separator="; ",
    arguments_key="parameters",
    optional_trigger="<|python_tag|>",
)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", "]", separator=", ")
GRANITE = ToolFormat("granite", "<|tool_call|>", "[", "]", separator=", ")

PYTHONIC = ToolFormat(
    "pythonic",
    "",
    "[",
    "]",
    separator=", ",
    syntax="pythonic",
    marks=(pythonic.BEGIN, pythonic.END),
)
DEEPSEEK = ToolFormat(
    "deepseek",
    deepseek.CALLS_BEGIN,
    after=deepseek.CALLS_END,
    separator="\n",
    syntax="deepseek",
    marks=(deepseek.CALLS_END, deepseek.CALL_BEGIN, deepseek.CALL_END, deepseek.SEPARATOR),
)
HARMONY = ToolFormat("harmony", "", syntax="harmony", marks=harmony.MARKS)

LFM2 = ToolFormat(
    "lfm2",
    "<|tool_call_start|>",
    syntax="layout",
    layout=CallLayout(
        f"{NAME}(",
        Style.PYTHON,
        section="<|tool_call_start|>[",
        section_end="]<|tool_call_end|>",
        separator=", ",
    ),
)
KIMI = ToolFormat(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    syntax="layout",
    layout=CallLayout(
        f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        section="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
    ),
)
PHI4 = ToolFormat(
    "phi4",
    "<|tool_call|>",
    after="<|/tool_call|>",
    layout=CallLayout(
        f'{{"name": "{NAME}", "arguments": ',
        tail="}",
        section="<|tool_call|>[",
        section_end="]<|/tool_call|>",
        separator=", ",
    ),
)
FUNCTIONARY = ToolFormat("functionary", "", separator=functionary.SEPARATOR, syntax="functionary")

FORMATS = {
    each.name: each
    for each in (
        HERMES,
        GENERIC,
        LLAMA3,
        MISTRAL,
        GRANITE,
        PYTHONIC,
        DEEPSEEK,
        HARMONY,
        LFM2,
        KIMI,
        PHI4,
        FUNCTIONARY,
    )
}
"""The formats by their names."""
ALIASES = {
    "qwen": "hermes",
    "llama": "llama3_json",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "deepseek_v3": "deepseek",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
}


def format_of_template(template: str | None) -> ToolFormat:
    """The format of calls that a chat template describes.

    Args:
        template: The template; None: the model has none.
    """
    text = template or ""
    # from the rarest marks to those that several families have
    if harmony.CHANNEL in text:
        return HARMONY
    if deepseek.CALLS_BEGIN in text:
        return DEEPSEEK
    if KIMI.trigger in text:
        return KIMI
    if any(mark in text for mark in ("<|tool_list_start|>", LFM2.trigger, "List of tools: [")):
        return LFM2
    # the example in the instructions of Llama 3.2's template
    if pythonic.BEGIN in text or "func_name1(params_name1=params_value1" in text:
        return PYTHONIC
    if "[TOOL_CALLS]" in text:
        return MISTRAL
    # `ipython` is Llama 3's role of results
    if "<|python_tag|>" in text or ('"parameters"' in text and "ipython" in text):
        return LLAMA3
    if f"{functionary.SEPARATOR}{functionary.EVERYONE}\\n" in text or ">>>all\n" in text:
        return FUNCTIONARY
    # before Granite's, as the first of its two marks is the same
    if PHI4.after in text:
        return PHI4
    if "<|tool_call|>" in text:
        return GRANITE
    if "<tool_call>" in text or "<tools>" in text:
        return HERMES
    return GENERIC


def description(tools: Sequence[Tool], tool_format: ToolFormat) -> str:
    """A system message that describes tools, for models whose template does not.

    Args:
        tools: The tools.
        tool_format: How they are called.
    """
    lines = [json.dumps(tool.as_openai()["function"], ensure_ascii=False) for tool in tools]
    call = tool_format.render_call("NAME", "{...}")
    return (
        "You can call these functions, each described by a JSON object:\n"
        + "\n".join(lines)
        + f"\nTo call one, answer with:\n{call}"
    )
