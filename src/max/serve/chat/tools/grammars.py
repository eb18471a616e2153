"""Grammars of answers that may call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from max._dataclass import dataclass
from max.pipelines.structured.grammar import JSON_STYLE
from max.serve.chat.tools import deepseek, harmony, pythonic
from max.serve.chat.tools.arguments.rule_list import RuleList, UnheldKeyword
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.chat.tools.formats import ToolFormat
from max.serve.chat.tools.layouts.grammar import LayoutRules, free_text, layout_rules
from max.serve.chat.tools.layouts.layout import CallLayout, Style

_PYTHON = CallLayout("", Style.PYTHON)
_SPACE = {**JSON_STYLE, "lenient": True, "coerce_one_of": True}


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammar of an answer.

    Args:
        text: The grammar; None: any text.
        unheld: What it does not hold of the schemas of the tools.
    """

    text: str | None
    unheld: tuple[UnheldKeyword, ...] = ()


def answer_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    tool_format: ToolFormat,
    special_tokens: dict[str, int],
    content_grammar: str | None = None,
    text_marks: Sequence[str] = (),
) -> AnswerGrammar:
    """The grammar of an answer to a request with tools.

    Args:
        tools: The tools, with schemas that a grammar holds.
        choice: Whether they are called, and which.
        tool_format: How they are called.
        special_tokens: The special tokens by their texts.
        content_grammar: The grammar of an answer without calls; None: any text.
        text_marks: Special tokens that free text may have, such as those around reasoning.

    Returns:
        The grammar, without one if it would allow any text, or calls cannot be distinguished from text. With
        ``AUTO`` an answer is free text until the mark of a call; then it must be a call that fits.
    """
    # the template shows all tools, the grammar writes those that may be called
    called = [tool for tool in tools if choice.may_call(tool.name)]
    must = choice.kind in (ChoiceKind.REQUIRED, ChoiceKind.NAMED)
    several = choice.parallel and choice.kind is not ChoiceKind.NAMED
    if tool_format.syntax == "harmony":
        several = False  # a call ends the answer
    layout = tool_format.layout
    marked = bool(tool_format.trigger) or tool_format.syntax == "pythonic"
    # marks that are spelled in letters could not be distinguished from text
    marked |= tool_format.syntax == "harmony" and special_tokens.keys() >= set(harmony.MARKS)
    # without a mark any text may be a call, so nothing can be held
    if not must and not marked and content_grammar is None:
        return AnswerGrammar(None)
    rules: list[str] = []
    rule_list = RuleList()
    for number, tool in enumerate(called):
        if layout is None:
            rules.append(
                f"object_{number}: {_call_rule(number, tool, tool_format, special_tokens, rule_list)}"
            )
    if layout is not None:
        free = not must and content_grammar is None
        start, rules = layout_rules(
            layout, called, special_tokens, _SPACE, free, several, text_marks, rule_list
        )
        text = _join_rules(start, rules, content_grammar if not must else None)
        return AnswerGrammar(text, tuple(rule_list.unheld))
    objects = " | ".join(f"object_{number}" for number in range(len(called)))
    rules.append(f"object: {objects}")
    between = tool_format.separator
    body = "object"
    if between is not None and several:
        body = f"object ({json.dumps(between)} object)*"
    before, after = _quote(tool_format.before), _mark(tool_format.after, special_tokens)
    special = special_tokens.get(tool_format.trigger)
    trigger = f"<[{special}]>" if special is not None else _quote(tool_format.trigger)
    if tool_format.syntax == "harmony":
        rules += _harmony_messages(special_tokens)
        rules.append("calls: message* object")
        start = "calls" if must or content_grammar is not None else "calls | message* final | TEXT"
    elif tool_format.syntax == "pythonic" and not must and content_grammar is None:
        rules += _pythonic_openings(called, special_tokens, rule_list)
        more = f"({json.dumps(between)} object)*" if several else ""
        rules.append(f"calls: opening {more} {after} ({_mark(pythonic.END, special_tokens)})?")
        start = "calls | TEXT"
    elif must or content_grammar is not None:
        rules.append(f"calls: {trigger} {before} {body} {after}")
        more = ' ("\\n"? calls)*' if between is None and several else ""
        start = f"calls{more}"
    else:
        # text, in which the trigger begins a call
        rules.append("TEXT: /(.|\\n)*/")
        if special is None:
            rules.append(f"trigger[lazy]: TEXT {trigger}")
        else:
            rules.append(f"trigger: TEXT {trigger}")
        rules.append(f"calls: trigger {before} {body} {after}")
        start, texts = free_text(several and between is None, special_tokens, text_marks)
        rules += texts
    rules += rule_list.rules
    text = _join_rules(start, rules, content_grammar if not must else None)
    return AnswerGrammar(text, tuple(rule_list.unheld))


def _join_rules(start: str, rules: Sequence[str], content_grammar: str | None) -> str:
    """The grammar of some rules, or of an answer with another grammar."""
    if content_grammar is not None:
        # the other grammar of the list below, by its name
        start = f"{start} | @content"
    lark = "\n".join(["%llguidance {}", f"start: {start}", *rules])
    if content_grammar is None:
        return lark
    content = {"lark_grammar": content_grammar}
    # a list of grammars as JSON, else a grammar in Lark's syntax
    if content_grammar.lstrip().startswith("{"):
        (content,) = json.loads(content_grammar)["grammars"]
    return json.dumps(
        {"grammars": [{"name": "answer", "lark_grammar": lark}, {**content, "name": "content"}]}
    )


def _call_rule(
    number: int,
    tool: Tool,
    tool_format: ToolFormat,
    special_tokens: dict[str, int],
    rule_list: RuleList,
) -> str:
    """The rule of a call of one tool."""

    def mark(text: str) -> str:
        return _mark(text, special_tokens)

    schema = json.dumps({**tool.parameters, "x-guidance": _SPACE})
    match tool_format.syntax:
        case "pythonic":
            return f"{_quote(tool.name + '(')} {_python_arguments(number, tool, rule_list)}"
        case "deepseek":
            head = f"{mark(deepseek.CALL_BEGIN)} {_quote(tool.name)} {mark(deepseek.SEPARATOR)}"
            return f"{head} %json {schema} {mark(deepseek.CALL_END)}"
        case "harmony":
            to, channel = f" to=functions.{tool.name}", mark(harmony.CHANNEL)
            first = f"{channel} {_quote('commentary' + to)}"
            last = f'{_quote(to)} {channel} "commentary"'  # the recipient may be in the role
            kind = f'(" " ({mark(harmony.CONSTRAIN)})? "json")?'
            return f"({first} | {last}) {kind} {mark(harmony.MESSAGE)} %json {schema}"
        case "functionary":
            return f"{_quote(tool.name)} {json.dumps(chr(10))} %json {schema}"
        case _:
            head = f'{{"{tool_format.name_key}": {json.dumps(tool.name)}, "{tool_format.arguments_key}": '
            return f'{json.dumps(head)} %json {schema} "}}"'


def _harmony_messages(special_tokens: dict[str, int]) -> list[str]:
    """The rules of the messages before a call, and of the last one of an answer that calls nothing."""

    def mark(text: str) -> str:
        return _mark(text, special_tokens)

    marks = "|".join(text[2:-2] for text in harmony.MARKS)
    body = f"{mark(harmony.MESSAGE)} TEXT"
    end = f'{mark(harmony.END)} {mark(harmony.START)} "assistant"'
    return [
        f'message: {mark(harmony.CHANNEL)} ("analysis" | "commentary") {body} {end}',
        f'final: {mark(harmony.CHANNEL)} "final" {body}',
        # letters that spell a mark would end the message for the parser
        rf"TEXT: /(.|\n)*/ & ~/(.|\n)*<\|({marks})\|>(.|\n)*/",
    ]


def _python_arguments(number: int, tool: Tool, rule_list: RuleList) -> str:
    """The rule of arguments in Python's syntax, with the bracket after them."""
    return LayoutRules(_PYTHON, {}, _SPACE, rule_list).arguments(number, tool)


def _pythonic_openings(
    tools: Sequence[Tool], special_tokens: dict[str, int], rule_list: RuleList
) -> list[str]:
    """The rules of a list's first call, and of text that does not begin like a list of calls.

    The lexer takes the longest match: a terminal that ends within the begin of a text would lose to it.
    So the list's bracket and the first call's name are one terminal.
    """
    space, begin = r"[ \t\r\n]{0,8}", pythonic.BEGIN
    special = begin in special_tokens
    mark = "" if special else f"({_escape_pattern(begin)}{space})?"
    rules: list[str] = []
    for number, tool in enumerate(tools):
        keywords = _python_arguments(number, tool, rule_list)
        # one terminal up to the bracket, so that the lexer chooses it or text by its whole length
        rules.append(rf"OPENING_{number}: /{space}{mark}\[{space}{_escape_pattern(tool.name)}\(/")
        rules.append(f"opening_{number}: OPENING_{number} {keywords}")
    openings = [f"opening_{number}" for number in range(len(tools))]
    if special:
        openings = [*openings, *(f"{_mark(begin, special_tokens)} {each}" for each in openings)]
    rules.append(f"opening: {' | '.join(openings)}")
    rules.append(rf"TEXT: /(.|\n)*/ & ~/{pythonic.CALLS_PATTERN}(.|\n)*/")
    return rules


def _escape_pattern(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def _mark(text: str, special_tokens: dict[str, int]) -> str:
    """A mark, as its special token if it is one."""
    special = special_tokens.get(text)
    return f"<[{special}]>" if special is not None else _quote(text)


def _quote(text: str) -> str:
    return json.dumps(text) if text else ""
